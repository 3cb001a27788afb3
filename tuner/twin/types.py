"""What simulators take and give. Read this first."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.emulated.profile import Profile
from tuner.blame import Cause as Cause
from tuner.plan import Plan
from tuner.slo import SloTable
from tuner.workload import Floats, Ints, Workload


class TwinEngine(NamedTuple):
    """One engine of a simulated fleet. `profile` holds its latency coefficients, fitted or shipped, and its memory."""

    engine_id: str
    profile: Profile


Fleet = Sequence[TwinEngine]


class Ending(enum.IntEnum):
    """How a simulated request ended."""

    OK = 0
    SHED = 1
    NO_ROOM = 2
    """Waited in the router's queue for longer than it may."""


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """What became of each request of a workload: columns of its length. Seconds; NaN where there is no such time."""

    ending: NDArray[np.int8]
    ttft_s: Floats
    tpot_s: Floats
    """NaN for one output token: the bound then counts as met."""
    e2e_s: Floats
    queue_s: Floats
    """Waiting in the router and in engines, before any prefill."""
    prefill_s: Floats
    transfer_s: Floats
    decode_s: Floats
    cached_tokens: Ints
    decode_engine: Ints
    """Index into the fleet; meaningless unless `ending` is OK."""
    split: NDArray[np.bool_]
    """Whether another engine prefilled part of it."""
    busy_prefill_s: Floats
    """Per engine: seconds of passes that prefill."""
    busy_decode_s: Floats
    """Per engine: seconds of passes that only decode."""
    makespan_s: float
    """When the last request ended."""

    def take(self, rows: NDArray[np.bool_]) -> "Timeline":
        """Only some of the requests; what is per engine stays as it is."""
        columns = {name: getattr(self, name)[rows] for name in PER_REQUEST}
        return replace(self, **columns)


PER_REQUEST = (
    "ending",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "queue_s",
    "prefill_s",
    "transfer_s",
    "decode_s",
    "cached_tokens",
    "decode_engine",
    "split",
)


class Simulator(Protocol):
    """Runs a whole workload through a fleet under one plan, from idle and with empty context caches to the last token.

    Deterministic: the same arguments give the same timeline. Raises `ValueError` for an empty fleet.
    """

    def __call__(self, workload: Workload, fleet: Fleet, plan: Plan, slos: SloTable) -> Timeline: ...


@dataclass(frozen=True, slots=True)
class ClassForecast:
    """One class of requests. Percentiles are 50, 90, 99."""

    requests: int
    attainment: float | None
    """Share that met both bounds; `None` without requests."""
    ttft_s: tuple[float, float, float] | None
    tpot_s: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan would do to a workload."""

    offered_rps: float
    goodput_rps: float
    """Requests per second of the workload's span that met both bounds."""
    weighted_goodput: float
    """The same with each class's weight."""
    shortfall: float
    """Weighted share of requests by which classes miss their attainment targets; 0: every target is met."""
    classes: Mapping[str, ClassForecast]
    utilisation: Mapping[str, float]
    """Busy share of engines by role (prefill, decode, mixed)."""
    causes: Mapping[Cause, int]
    """Violations by what they are put down to."""
