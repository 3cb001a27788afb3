"""A tournament tree of times: the earliest in one look, a change in as many steps as it has levels.

Node 1 is the top, node `i` holds the smaller of its children `2i` and `2i + 1`; the leaves are the second half. Each
engine has two leaves: the end of its pass and, behind all of those, its link's next event.
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
    timers = world.timers
    node = world.state.leaves + index
    nth(timers, node).at_s = at_s
    node >>= 1
    while node:
        smaller = min(nth(timers, 2 * node).at_s, nth(timers, 2 * node + 1).at_s)
        if nth(timers, node).at_s == smaller:
            return
        nth(timers, node).at_s = smaller
        node >>= 1


@compiled
def first_timer(world: Any) -> int:
    """Which of them is the earliest."""
    timers, leaves = world.timers, world.state.leaves
    node = 1
    while node < leaves:
        node = 2 * node if nth(timers, 2 * node).at_s <= nth(timers, 2 * node + 1).at_s else 2 * node + 1
    return int(node - leaves)
