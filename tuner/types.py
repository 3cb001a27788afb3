"""The nouns of the tuner: what it observes, what it considers, what it decides. Read this first."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.emulated.profile import Profile
from tuner.plan import HotPrefix, Knobs, Plan
from tuner.slo import SloTable
from tuner.twin.types import Cause, Forecast
from tuner.workload import Workload


class Mode(enum.StrEnum):
    """Who moves the plan."""

    AUTO = "auto"
    ADVISORY = "advisory"
    """The tuner decides and says so, but publishes nothing."""
    MANUAL = "manual"
    """The operator pinned a plan."""
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class EngineState:
    """One live engine as heartbeats and models show it."""

    engine_id: str
    kind: str
    profile: Profile
    """Memory and scheduler from the engine itself, latencies fitted from what it did, else from the prior."""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What clients got in an interval, by arrival: only requests whose fate is settled or overdue count."""

    span_s: float
    requests: int
    offered_rps: float
    goodput_rps: float
    attainment: Mapping[str, float]
    """By class; classes without requests are left out."""
    causes: Mapping[Cause, int] = field(default_factory=dict)
    plan_version: int | None = None
    """The plan that these requests ran under; `None` if several."""


@dataclass(frozen=True, slots=True)
class HotContext:
    """The beginning of many prompts: so much of the traffic that the one engine that holds it may be too few."""

    prefix: str
    """Chained hash of its last block, in hexadecimal, as plans name it."""
    blocks: int
    requests: int
    """Of those looked at, how many begin with it."""
    share: float
    """The same as a share of all."""
    tokens: int
    """Estimated length."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything one tick knows."""

    now_s: float
    """Unix time."""
    engines: Sequence[EngineState]
    slos: SloTable
    plan: Plan
    """In force now."""
    workload: Workload
    """Demand of the last minutes by arrival, oldest first; its end is `now_s`."""
    measured: Measured | None
    """Of requests that arrived under the plan in force; `None` while there are too few."""
    hot: Sequence[HotContext] = ()
    """What most prompts begin with, the most work first."""

    @property
    def usable(self) -> Sequence[EngineState]:
        """Engines that take new work; plans are made for these."""
        return [engine for engine in self.engines if not engine.draining]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan without its place in history: what the search chooses between."""

    pattern: str
    knobs: Knobs
    prefill_engines: int
    decode_engines: int
    mixed_engines: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """A candidate and what it is expected to give, as means over the bootstrapped workloads of one search."""

    candidate: Candidate
    forecast: Forecast
    """On one of the workloads, uncorrected: the details behind the means."""
    goodput_rps: float
    """Corrected by the measured error of past predictions."""
    offered_rps: float
    shortfall: float
    """Weighted share of requests by which classes miss their attainment targets."""
    score: float
    """What is maximised: weighted goodput, less what misses the attainment targets; requests per second."""
    gain: float = 0.0
    """Score above that of the plan in force on the same workloads."""
    gain_se: float = 0.0
    """Standard error of `gain` over the workloads."""
    least_gain: float = 0.0
    """`gain` on the workload that suits the candidate least."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best candidates first. `incumbent` is the plan in force, predicted on the same workloads."""

    ranked: Sequence[Prediction]
    incumbent: Prediction
    best_static: Prediction
    trials: int
    seconds: float
    replicas: tuple[HotPrefix, ...] = ()
    """Hot contexts that would pay to be copied, under the plan in force; empty: none, or the plan has them already."""


class Reason(enum.StrEnum):
    """Why a tick did what it did; exactly one a tick."""

    BOOTSTRAP = "bootstrap"
    """Still gathering requests or models."""
    NO_TRAFFIC = "no_traffic"
    """Nothing arrives: there is nothing to learn from, and the plan stays."""
    NO_ENGINES = "no_engines"
    PAUSED = "paused"
    PINNED = "pinned"
    """An operator's plan is in force and mode is `manual`."""
    ADVISORY = "advisory"
    """Would have changed the plan, but may not."""
    BETTER_PLAN = "better_plan"
    DRIFT = "drift"
    """Changed because the traffic moved."""
    FLEET_CHANGED = "fleet_changed"
    SLO_CHANGED = "slo_changed"
    GUARD_STATIC = "guard_static"
    """Fell back to the best static baseline."""
    HOT_PREFIX = "hot_prefix"
    """The plan stays, but contexts that much of the traffic begins with are copied to more engines."""
    ROLLED_BACK = "rolled_back"
    """Probation: measured goodput fell short of the promise at comparable load."""
    PROBATION = "probation"
    """Waiting to see whether the last change keeps its promise."""
    DWELL = "dwell"
    """A better plan is known, but the last change is too recent."""
    GAIN_TOO_SMALL = "gain_too_small"
    STEADY = "steady"
    """The plan in force is the best known."""


CHANGES = frozenset(
    {
        Reason.BETTER_PLAN,
        Reason.DRIFT,
        Reason.FLEET_CHANGED,
        Reason.SLO_CHANGED,
        Reason.GUARD_STATIC,
        Reason.HOT_PREFIX,
        Reason.ROLLED_BACK,
    }
)
"""Reasons that go with a new plan."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One tick's outcome. `chosen` is what to publish now, `None` to leave the plan as it is."""

    reason: Reason
    sentence: str
    """For the operator: what was seen, what was done or refused, with numbers."""
    chosen: Candidate | None = None
    proposed: Candidate | None = None
    """What would have been published, if the mode had let it."""
    promise: Prediction | None = None
    """What `chosen` or `proposed` is expected to give."""
    considered: SearchResult | None = None
    measured: Measured | None = None
    drifted: Sequence[str] = ()
    """Names of the features that moved."""
    replicas: tuple[HotPrefix, ...] = ()
    """Contexts to be copied under the chosen or proposed plan, beside those that it keeps from the plan in force."""
