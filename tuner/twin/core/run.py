"""The loop of the fast twin: whatever comes first happens, until every request has ended."""

import math
from typing import Any

from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import NONE
from tuner.twin.core.queue import next_to_give_up
from tuner.twin.core.router import arrive, give_up, landed, poll, settle, tell
from tuner.twin.core.scheduler import begin_pass, end_pass, next_told
from tuner.twin.core.timers import first_timer
from tuner.twin.limits import POLL_S, QUEUE_S


@compiled
def run(world: Any) -> None:
    state = world.state
    while state.ended < state.requests:
        arrival_s = nth(world.requests, state.arrived).arrived_s if state.arrived < state.requests else math.inf
        timer_s = nth(world.timers, 1).at_s
        giving_up = next_to_give_up(world)
        deadline_s = math.inf if giving_up == NONE else nth(world.requests, giving_up).arrived_s + QUEUE_S
        soonest_s = min(timer_s, deadline_s, state.poll_s)
        if arrival_s <= soonest_s:
            state.now_s = arrival_s
            state.arrived += 1
            arrive(world, state.arrived - 1)
        elif timer_s == soonest_s:
            state.now_s = timer_s
            on_timer(world, first_timer(world))
        elif deadline_s == soonest_s:
            state.now_s = deadline_s
            give_up(world, giving_up)
        else:
            state.now_s = state.poll_s
            poll_next(world)
        settle(world)


@compiled
def on_timer(world: Any, timer: int) -> None:
    """What comes out of a pass reaches the router when the engine's next pass has begun."""
    if timer >= world.state.engines:
        landed(world, timer - world.state.engines)
        return
    now_s = world.state.now_s
    end_pass(world, timer, now_s)
    begin_pass(world, timer, now_s)
    number = next_told(world)
    while number != NONE:
        tell(world, number)
        number = next_told(world)


@compiled
def poll_next(world: Any) -> None:
    """The router asks one engine after the other for its load."""
    state = world.state
    poll(world, state.polled)
    state.polled = (state.polled + 1) % world.state.engines
    state.poll_s += POLL_S / world.state.engines
