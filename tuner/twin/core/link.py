"""The inbound link of an engine, shared evenly by its transfers; as `engines.emulated.link`."""

import math
from typing import Any

from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import NONE
from tuner.twin.core.timers import set_timer


@compiled
def start_flow(world: Any, row: int, now_s: float) -> None:
    """Send the KV of `[begin, end)` to the request's decode engine."""
    request = nth(world.requests, row)
    engine = nth(world.engines, request.decode)
    serve_until(world, engine, now_s)
    request.flow_end = engine.link_served + engine.bytes_per_token * (request.end - request.begin)
    before, after = NONE, engine.flow_first
    while after != NONE and nth(world.requests, after).flow_end <= request.flow_end:
        before, after = after, nth(world.requests, after).next_flow
    request.next_flow = after
    if before == NONE:
        engine.flow_first = row
    else:
        nth(world.requests, before).next_flow = row
    engine.flows += 1
    watch_link(world, request.decode)


@compiled
def watch_link(world: Any, index: int) -> None:
    engine = nth(world.engines, index)
    at_s = math.inf
    if engine.landing_first != NONE:
        at_s = nth(world.requests, engine.landing_first).lands_s
    elif engine.flow_first != NONE:
        at_s = next_served_s(world, engine) + engine.g
    set_timer(world, world.state.engines + index, at_s)


@compiled
def next_landed(world: Any, index: int, now_s: float) -> int:
    """Take the next transfer that has ended; `NONE` if there is no more."""
    engine = nth(world.engines, index)
    serve_until(world, engine, now_s)
    row = engine.landing_first
    if row == NONE or nth(world.requests, row).lands_s > now_s:
        return NONE
    engine.landing_first = nth(world.requests, row).next_flow
    if engine.landing_first == NONE:
        engine.landing_last = NONE
    return int(row)


@compiled
def next_served_s(world: Any, engine: Any) -> float:
    left = max(0.0, nth(world.requests, engine.flow_first).flow_end - engine.link_served)
    return float(engine.link_now_s + left * engine.flows / engine.bandwidth)


@compiled
def serve_until(world: Any, engine: Any, now_s: float) -> None:
    while engine.flow_first != NONE:
        at_s = next_served_s(world, engine)
        if at_s > now_s:
            break
        row = engine.flow_first
        engine.link_now_s = at_s
        engine.link_served = nth(world.requests, row).flow_end
        engine.flow_first = nth(world.requests, row).next_flow
        engine.flows -= 1
        if engine.flow_first == NONE:
            engine.link_served = 0.0
        land(world, engine, row, at_s + engine.g)
    if engine.flows:
        engine.link_served += (now_s - engine.link_now_s) * engine.bandwidth / engine.flows
    engine.link_now_s = max(engine.link_now_s, now_s)


@compiled
def land(world: Any, engine: Any, row: int, at_s: float) -> None:
    request = nth(world.requests, row)
    request.lands_s = at_s
    request.next_flow = NONE
    if engine.landing_last == NONE:
        engine.landing_first = row
    else:
        nth(world.requests, engine.landing_last).next_flow = row
    engine.landing_last = row
