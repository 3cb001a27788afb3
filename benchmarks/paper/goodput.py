"""Goodput per GPU: the highest rate at which a system keeps enough requests within both bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.adapt.generate import lengths
from benchmarks.paper.published import Comparison, Dataset, DistServe, System, find_profile
from benchmarks.paper.world import make_plan, simulated, simulated_from_prefill
from benchmarks.pool import side_by_side
from benchmarks.unshared import unshared
from engines.types import Role
from tuner.plan import DATA_PARALLEL, DISAGGREGATED
from tuner.twin.types import Ending, Fleet, Timeline, TwinEngine
from tuner.workload import Floats, Ints, Workload

IDLE_RPS = 0.02
"""Per GPU: requests hardly ever meet."""
FIRST_RPS = 0.5
"""Per GPU: where the search begins."""
PRECISION = 0.03
"""Relative: the search ends when the rate is known so well."""
HIGHEST_RPS = 64.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a system is worth on one workload. Rates are per GPU."""

    comparison: str
    system: str
    kind: str
    gpus: int
    goodput_rps: float
    """0: too many requests miss their bounds even when idle."""
    idle_attainment: float
    ttft_attainment: float
    """At the goodput, or idle if there is none: within the TTFT bound, whatever their TPOT."""
    tpot_attainment: float
    slo_scale: float
    """The factor on both bounds at which just enough requests meet them, at the comparison's fixed rate."""
    rates_rps: Sequence[float]
    """Tried, in order, with what was attained."""
    attainments: Sequence[float]
    as_published: Sequence[float] = ()
    """Attained at the rates of the published curve, of the baseline where there is one."""


@dataclass(frozen=True, slots=True)
class GoodputRun:
    """The search for one system's goodput."""

    comparison: Comparison
    system: System
    dataset: Dataset
    attainment: float
    requests: int
    seed: int

    @property
    def title(self) -> str:
        return f"{self.comparison.name}, {self.system.name}"

    @property
    def size(self) -> float:
        return 20.0 * self.requests

    def timeline(self, base: Workload, rate_rps: float) -> Timeline:
        """The same requests at a rate per GPU."""
        fleet, roles = set_up(self.system)
        pattern = DISAGGREGATED if Role.PREFILL in roles.values() else DATA_PARALLEL
        world = simulated_from_prefill if self.system.answers_first == "prefill" else simulated
        return world(base.at_rate(rate_rps * self.system.gpus), fleet, make_plan(pattern, roles))


def find_goodput(run: GoodputRun) -> Goodput:
    """Search for the rate, then look at what limits it and how tight the bounds may be."""
    bounds, base = run.comparison, drawn(run.dataset, run.requests, run.seed)
    tried: dict[float, float] = {}

    def attained(rate_rps: float) -> float:
        tried[rate_rps] = _attained(run, base, rate_rps)
        return tried[rate_rps]

    goodput_rps = highest_rate(attained, run.attainment)
    at_goodput = run.timeline(base, goodput_rps or IDLE_RPS)
    fixed = _excess(run.timeline(base, bounds.slo_rate_rps), bounds)
    rates = sorted(tried)
    return Goodput(
        comparison=bounds.name,
        system=run.system.name,
        kind=run.system.kind,
        gpus=run.system.gpus,
        goodput_rps=goodput_rps,
        idle_attainment=tried[IDLE_RPS],
        ttft_attainment=_share(at_goodput, at_goodput.ttft_s <= bounds.ttft_s),
        tpot_attainment=_share(at_goodput, ~(at_goodput.tpot_s > bounds.tpot_s)),
        slo_scale=float(np.quantile(fixed, run.attainment, method="inverted_cdf")),
        rates_rps=rates,
        attainments=[tried[rate] for rate in rates],
        as_published=[_attained(run, base, rate) for rate in _published_rates(run)],
    )


def find_all(spec: DistServe, requests: int, seed: int) -> list[Goodput]:
    """Every system of every comparison, in order."""
    runs = [
        GoodputRun(each, system, spec.lengths[each.lengths], spec.attainment, requests, seed)
        for each in spec.comparisons
        for system in each.systems
    ]
    found = {(run.comparison.name, run.system.name): each for run, each in side_by_side(runs, find_goodput)}
    return [found[run.comparison.name, run.system.name] for run in runs]


def highest_rate(attained: Callable[[float], float], target: float) -> float:
    """The highest rate at which `attained` is at least `target`, within `PRECISION`; 0 if it is not even when idle.

    It is taken to fall with the rate: doubled from `FIRST_RPS` until too few are left, then halved between.
    """
    if attained(IDLE_RPS) < target:
        return 0.0
    low, high = IDLE_RPS, FIRST_RPS
    while high <= HIGHEST_RPS and attained(high) >= target:
        low, high = high, 2 * high
    while high / low > 1 + PRECISION:
        middle = float(np.sqrt(low * high))
        if attained(middle) >= target:
            low = middle
        else:
            high = middle
    return low


def drawn(dataset: Dataset, count: int, seed: int) -> Workload:
    """Poisson arrivals at one request a second, which share nothing."""
    rng = np.random.default_rng(seed)
    arrived_s = np.cumsum(rng.exponential(1.0, count))
    prompt, output = _pairs(dataset, count, rng)
    return unshared(float(arrived_s[-1]) + 1, arrived_s, prompt, output)


def set_up(system: System) -> tuple[Fleet, dict[str, Role]]:
    """A system's engines and the roles of those that have one."""
    fleet: list[TwinEngine] = []
    roles: dict[str, Role] = {}
    for number, engine in enumerate(system.engines):
        profile = find_profile(engine.profile)
        chunk = system.chunked_prefill_tokens or profile.chunked_prefill_tokens
        own = msgspec.structs.replace(profile, chunked_prefill_tokens=chunk, mixed_chunk=system.mixed_chunk)
        fleet.append(TwinEngine(f"e{number}", own))
        if engine.role is not Role.MIXED:
            roles[f"e{number}"] = engine.role
    return fleet, roles


def _attained(run: GoodputRun, base: Workload, rate_rps: float) -> float:
    return float((_excess(run.timeline(base, rate_rps), run.comparison) <= 1).mean())


def _published_rates(run: GoodputRun) -> Sequence[float]:
    curve = run.comparison.published.baseline_attained
    return curve.rates_rps if curve is not None and run.system.kind == "baseline" else ()


def _pairs(dataset: Dataset, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Prompt and output tokens; pairs that are too long for the model are left out or their prompts cut."""
    prompt = output = np.zeros(0, dtype=np.int64)
    while len(prompt) < count:
        asked, answered = lengths(dataset.prompt, count, rng), lengths(dataset.output, count, rng)
        if dataset.too_long == "cut":
            asked = np.minimum(asked, dataset.most_tokens - answered)
        fits = (asked + answered <= dataset.most_tokens) & (asked > 1)
        prompt, output = np.concatenate([prompt, asked[fits]]), np.concatenate([output, answered[fits]])
    return prompt[:count], output[:count]


def _excess(timeline: Timeline, bounds: Comparison) -> Floats:
    """The larger of TTFT and TPOT, each relative to its bound; infinite for what was not answered."""
    tpot = np.nan_to_num(timeline.tpot_s, nan=0.0) / bounds.tpot_s
    served = timeline.ending == Ending.OK
    return np.where(served, np.maximum(np.nan_to_num(timeline.ttft_s) / bounds.ttft_s, tpot), np.inf)


def _share(timeline: Timeline, met: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> float:
    return float((met & (timeline.ending == Ending.OK)).mean())
