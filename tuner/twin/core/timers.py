"""A tournament tree of times: the earliest in one look, a change in as many steps as it has levels.

Node 1 is the top, node `i` holds the earlier of its children `2i` and `2i + 1`; the leaves are the second half. Each
engine has two leaves: the end of its pass and, behind all of those, its link's next event. Of equal times the one that
was set first comes first: prompts of one length make many of those, and who is told first gets the room.
"""

from typing import Any

import numpy as np

from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import TIMER, Records


def make_timers(count: int) -> Records:
    """Room for `count` times, none of them set."""
    leaves = 1 << max(1, (count - 1).bit_length())
    timers = np.zeros(2 * leaves, TIMER)
    timers["at_s"] = np.inf
    return timers


@compiled
def set_timer(world: Any, index: int, at_s: float) -> None:
    state, timers = world.state, world.timers
    state.set_timers += 1
    leaf = nth(timers, state.leaves + index)
    leaf.at_s, leaf.order = at_s, state.set_timers
    place = (state.leaves + index) >> 1
    while place:
        node, earlier = nth(timers, place), nth(timers, earlier_child(timers, place))
        if node.at_s == earlier.at_s and node.order == earlier.order:
            return
        node.at_s, node.order = earlier.at_s, earlier.order
        place >>= 1


@compiled
def earlier_child(timers: Any, place: int) -> int:
    left, right = nth(timers, 2 * place), nth(timers, 2 * place + 1)
    if right.at_s < left.at_s or (right.at_s == left.at_s and right.order < left.order):
        return 2 * place + 1
    return 2 * place


@compiled
def first_timer(world: Any) -> int:
    """Which of them is the earliest."""
    place = 1
    while place < world.state.leaves:
        place = earlier_child(world.timers, place)
    return int(place - world.state.leaves)
