"""`tuner.placement.place` and `admit` over arrays, ties and all.

Candidates to decode on are found one by one: most requests need only the first.
"""

import math
from typing import Any

from tuner.placement import AFFINITY_SHARE, MAX_CANDIDATES, REQUEST_TOKENS
from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import ADMIT_ALL, ADMIT_SHED, NONE, PREFIX_AFFINITY, ROUND_ROBIN

ADMIT, WAIT, SHED = 0, 1, 2
FULL = 1 << 52
UNCACHED = 1 << 51
"""Weights of the first two parts of the cost of a decode engine, above any number of free tokens."""
WORST = 1 << 62


@compiled
def place(world: Any, row: int) -> None:
    """Find the first engine to decode on and, if the prompt is split, one to prefill on; hints must be shown."""
    state, plan = world.state, world.plan
    state.bound = 2 + 1.25 * state.inflight / state.decoders
    state.tried, state.tried_cost, state.last_tried = 0, -WORST, NONE
    state.turn = nth(world.requests, row).turn % state.decoders
    state.first = next_decode(world, row)
    state.prefill = NONE
    if not plan.data_parallel and worth_splitting(world, row):
        state.prefill = best_prefill(world, row, state.first)


@compiled
def next_decode(world: Any, row: int) -> int:
    """The next best engine to decode on, `NONE` after the last."""
    state = world.state
    if state.tried == MAX_CANDIDATES:
        return NONE
    state.tried += 1
    if world.plan.policy == ROUND_ROBIN:
        return next_in_turn(world)
    best, best_cost = NONE, WORST
    again, worst, last = state.tried > 1, state.tried_cost, state.last_tried
    for index in range(state.engines):
        if nth(world.views, index).role == state.not_decoding:
            continue
        cost = decode_cost(world, row, index)
        if cost < best_cost and not (again and (cost < worst or (cost == worst and index <= last))):
            best, best_cost = index, cost
    state.tried_cost, state.last_tried = best_cost, best
    return int(best)


@compiled
def next_in_turn(world: Any) -> int:
    """Round robin: from the first on, each able engine once."""
    state = world.state
    count = world.state.engines
    index, skipped = state.last_tried, state.turn if state.tried == 1 else 0
    while True:
        index = (index + 1) % count
        if state.tried > 1 and index == state.first:
            return NONE
        if nth(world.views, index).role != state.not_decoding:
            if not skipped:
                state.last_tried = index
                return int(index)
            skipped -= 1


@compiled
def decode_cost(world: Any, row: int, index: int) -> int:
    plan, view, request = world.plan, nth(world.views, index), nth(world.requests, row)
    if plan.data_parallel:
        load = view.pending + REQUEST_TOKENS * view.inflight
        return int(load + max(1, request.prompt - view.hint) if plan.policy == PREFIX_AFFINITY else load)
    cost = -view.kv_free
    if view.inflight > world.state.bound:
        cost += FULL
    if plan.policy != PREFIX_AFFINITY or view.hint < AFFINITY_SHARE * request.prompt:
        cost += UNCACHED
    return int(cost)


@compiled
def worth_splitting(world: Any, row: int) -> bool:
    plan, request = world.plan, nth(world.requests, row)
    cached = nth(world.views, world.state.first).hint
    if request.prompt < 2 or request.prompt - cached < plan.min_remote:
        return False
    return bool(cached < plan.bypass_fraction * request.prompt)


@compiled
def split_end(prompt: int, offload_ratio: float) -> int:
    return max(1, min(prompt - 1, math.ceil((1 - offload_ratio) * prompt)))


@compiled
def best_prefill(world: Any, row: int, receiver: int) -> int:
    """Where this prompt would be prefilled first, other than on the receiver and the best engine to decode on."""
    state, prompt = world.state, nth(world.requests, row).prompt
    rated = all_rated(world)
    best, best_cost = NONE, math.inf
    for index in range(state.engines):
        view = nth(world.views, index)
        if view.role == state.not_prefilling or index in (state.first, receiver):
            continue
        uncached = max(1, prompt - view.hint)
        if rated:
            cost = (view.pending + uncached) / view.rate
        else:
            cost = float(view.pending + REQUEST_TOKENS * view.inflight + uncached)
        if cost < best_cost:
            best, best_cost = index, cost
    return int(best)


@compiled
def all_rated(world: Any) -> bool:
    """Whether the prefill rate of every engine but the best one to decode on is known."""
    state = world.state
    first = nth(world.views, state.first)
    own = first.rate == 0.0 and first.role != state.not_prefilling
    return bool(state.unrated == (1 if own else 0))


@compiled
def verdict(world: Any, row: int) -> int:
    """Admission for the request that was just placed."""
    plan, state, request = world.plan, world.state, nth(world.requests, row)
    if plan.admission == ADMIT_ALL:
        return ADMIT
    if plan.admission == ADMIT_SHED:
        at = state.first if state.prefill == NONE else state.prefill
        view = nth(world.views, at)
        if view.rate == 0.0:
            return ADMIT
        wait_s = (view.pending + max(1, request.prompt - view.hint)) / view.rate
        return SHED if wait_s > request.ttft_s else ADMIT
    full = plan.max_running != NONE and nth(world.views, state.first).inflight >= plan.max_running
    return WAIT if full else ADMIT
