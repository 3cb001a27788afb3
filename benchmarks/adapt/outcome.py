"""What a policy made of a workload, and how it compares with the oracle over time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuner.workload import Floats

TICK_S = 5.0
LOOK_S = 30.0
"""Requests that arrive within so long after a moment tell how a policy does at that moment."""
NEAR = 0.9
"""Share of the oracle's good requests at which a policy counts as being there."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Change:
    """One plan that a policy put in force."""

    at_s: float
    """Simulated time, from the start of the scenario."""
    reason: str
    plan: str
    sentence: str


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One policy on one scenario."""

    policy: str
    plan: str
    """The fixed plan or what the policy ended with, for people."""
    good: Flags
    """Which requests met both bounds, in order of arrival."""
    changes: Sequence[Change] = ()
    thought_s: float = 0.0
    """CPU time that deciding took."""

    @property
    def attainment(self) -> float:
        return float(self.good.mean()) if len(self.good) else 0.0


def reached_s(good: Flags, oracle: Flags, arrived_s: Floats, begin_s: float, end_s: float) -> float:
    """Seconds from `begin_s` until requests fare nearly as under the oracle; infinite if never before `end_s`.

    Looked at every tick, over the arrivals of the `LOOK_S` that follow.
    """
    ticks = int((end_s - begin_s) / TICK_S + 1e-9)
    for tick in range(ticks):
        at_s = begin_s + tick * TICK_S
        rows = (arrived_s >= at_s) & (arrived_s < min(at_s + LOOK_S, end_s))
        if good[rows].sum() >= NEAR * oracle[rows].sum():
            return tick * TICK_S
    return math.inf


def series(good: Flags, arrived_s: Floats, span_s: float, step_s: float = TICK_S) -> Floats:
    """Good requests a second, by the interval of `step_s` in which they arrived."""
    edges = np.arange(0.0, span_s + step_s, step_s)
    counts, _ = np.histogram(arrived_s[good], edges)
    return counts / step_s
