"""The router's queue: requests that wait for room, first come first served. As `controller.router.waiting`."""

from typing import Any

from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import NONE


@compiled
def append(world: Any, row: int) -> None:
    """Behind all others and, the first time, into the list by which waiting ends."""
    state, request = world.state, nth(world.requests, row)
    request.ahead, request.behind = state.queue_last, NONE
    if state.queue_last == NONE:
        state.queue_first = row
    else:
        nth(world.requests, state.queue_last).behind = row
    state.queue_last = row
    state.queued += 1
    if request.timed:
        return
    request.timed, request.next_deadline = 1, NONE
    if state.deadline_last == NONE:
        state.deadline_first = row
    else:
        nth(world.requests, state.deadline_last).next_deadline = row
    state.deadline_last = row


@compiled
def put_first(world: Any, row: int) -> None:
    """One that was woken in vain keeps its place."""
    state, request = world.state, nth(world.requests, row)
    request.ahead, request.behind = NONE, state.queue_first
    if state.queue_first == NONE:
        state.queue_last = row
    else:
        nth(world.requests, state.queue_first).ahead = row
    state.queue_first = row
    state.queued += 1


@compiled
def leave(world: Any, row: int) -> None:
    state, request = world.state, nth(world.requests, row)
    if request.ahead == NONE:
        state.queue_first = request.behind
    else:
        nth(world.requests, request.ahead).behind = request.behind
    if request.behind == NONE:
        state.queue_last = request.ahead
    else:
        nth(world.requests, request.behind).ahead = request.ahead
    state.queued -= 1


@compiled
def wake(world: Any) -> None:
    """Something became free: the one who has waited longest may try."""
    state, row = world.state, world.state.queue_first
    if row == NONE:
        return
    leave(world, row)
    nth(world.requests, row).behind = NONE
    if state.woken_last == NONE:
        state.woken_first = row
    else:
        nth(world.requests, state.woken_last).behind = row
    state.woken_last = row


@compiled
def next_woken(world: Any) -> int:
    """Take who may try next; `NONE` if nobody may."""
    state, row = world.state, world.state.woken_first
    if row != NONE:
        state.woken_first = nth(world.requests, row).behind
        if state.woken_first == NONE:
            state.woken_last = NONE
    return int(row)


@compiled
def next_to_give_up(world: Any) -> int:
    """Who has waited longest; those that wait no longer are passed over. `NONE` if nobody waits."""
    state = world.state
    while state.deadline_first != NONE and not nth(world.requests, state.deadline_first).waits:
        state.deadline_first = nth(world.requests, state.deadline_first).next_deadline
    if state.deadline_first == NONE:
        state.deadline_last = NONE
    return int(state.deadline_first)
