"""The evaluation of LLM MicroServing: each pattern at each rate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import msgspec
import numpy as np

from benchmarks.paper.curves import Curves
from benchmarks.paper.published import METRICS, PATTERNS, Hardware, Microserving, find_profile
from benchmarks.paper.world import make_plan, simulated
from benchmarks.pool import side_by_side
from benchmarks.unshared import unshared
from engines.emulated.profile import Profile
from engines.types import Role
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, Plan
from tuner.twin.types import Ending, Fleet, Timeline, TwinEngine
from tuner.workload import Floats, Workload

SPLIT = {"e0": Role.PREFILL, "e1": Role.DECODE}


SPREAD: Mapping[str, Callable[[Sequence[float]], float]] = {"jct_least_s": min, "jct_most_s": max}
"""Beside the means of the seeds: the mean JCT of the best and of the worst of them."""


class LostRequests(RuntimeError):
    """Requests ended without an answer, which no published curve allows for."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of the evaluation is run."""

    rates_rps: Sequence[float]
    requests: int
    warm_up: int
    seeds: int


@dataclass(frozen=True, slots=True)
class PatternRun:
    """One pattern at one rate on one seed's arrivals."""

    spec: Microserving
    hardware: str
    pattern: str
    rate_rps: float
    requests: int
    warm_up: int
    seed: int

    @property
    def title(self) -> str:
        return f"{self.hardware}, {self.pattern} at {self.rate_rps:g}/s"

    @property
    def size(self) -> float:
        return self.requests

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.hardware, self.pattern, self.rate_rps, self.seed


def run_pattern(run: PatternRun) -> Mapping[str, float]:
    """A value by metric."""
    hardware = run.spec.hardware[run.hardware]
    workload = sonnets(run.spec, run.rate_rps, run.requests + run.warm_up, run.seed)
    fleet, plan = set_up(run.spec, hardware, run.pattern)
    return measured(simulated(workload, fleet, plan), run.warm_up, hardware.overhead_s)


def run_patterns(spec: Microserving, sizes: Sizes, seed: int) -> dict[str, Curves]:
    """Curves by hardware, the mean of the seeds at each rate."""
    seeds = range(seed, seed + sizes.seeds)
    runs = [
        PatternRun(spec, hardware, pattern, rate, sizes.requests, sizes.warm_up, each)
        for hardware, pattern, rate, each in product(spec.hardware, PATTERNS, sizes.rates_rps, seeds)
    ]
    found = {run.key: values for run, values in side_by_side(runs, run_pattern)}

    def curve(hardware: str, pattern: str, metric: str, over_seeds: Callable[[Sequence[float]], float]) -> list[float]:
        return [
            over_seeds([found[hardware, pattern, rate, each][metric] for each in seeds]) for rate in sizes.rates_rps
        ]

    def curves(hardware: str, pattern: str) -> dict[str, list[float]]:
        means = {metric: curve(hardware, pattern, metric, fmean) for metric in METRICS}
        spread = {name: curve(hardware, pattern, "jct_mean_s", function) for name, function in SPREAD.items()}
        return means | spread

    return {
        hardware: Curves(sizes.rates_rps, {pattern: curves(hardware, pattern) for pattern in PATTERNS})
        for hardware in spec.hardware
    }


def sonnets(spec: Microserving, rate_rps: float, count: int, seed: int) -> Workload:
    """Poisson arrivals of nearly equal requests that share nothing. All patterns get the same ones."""
    rng = np.random.default_rng(seed)
    arrived_s = np.cumsum(rng.exponential(1 / rate_rps, count))
    prompt, output = (
        np.maximum(2, np.rint(rng.normal(tokens, spec.spread_tokens, count))).astype(np.int64)
        for tokens in (spec.prompt_tokens, spec.output_tokens)
    )
    return unshared(float(arrived_s[-1]) + 1 / rate_rps, arrived_s, prompt, output)


def set_up(spec: Microserving, hardware: Hardware, pattern: str) -> tuple[Fleet, Plan]:
    """The engines of a pattern and the plan for them."""
    if pattern == "tp8":
        return [TwinEngine("e0", _engine(spec, hardware.tp8))], make_plan(DATA_PARALLEL, {})
    fleet = [TwinEngine(f"e{number}", _engine(spec, hardware.tp4)) for number in range(2)]
    if pattern == "balanced":
        return fleet, make_plan(BALANCED, SPLIT, spec.offload_ratio)
    return fleet, make_plan(DISAGGREGATED, SPLIT) if pattern == "disaggregated" else make_plan(DATA_PARALLEL, {})


def measured(timeline: Timeline, warm_up: int, overhead_s: float) -> dict[str, float]:
    """Mean and P99 of TTFT, TPOT and JCT of all but the first requests. Raises `LostRequests`."""
    lost = int((timeline.ending != Ending.OK).sum())
    if lost:
        raise LostRequests(f"{lost} of {len(timeline.ending)} requests were not answered")
    ttft_s, jct_s = timeline.ttft_s[warm_up:] + overhead_s, timeline.e2e_s[warm_up:] + overhead_s
    return {**_both("ttft", ttft_s), **_both("tpot", timeline.tpot_s[warm_up:]), **_both("jct", jct_s)}


def _both(name: str, values: Floats) -> dict[str, float]:
    return {f"{name}_mean_s": float(np.mean(values)), f"{name}_p99_s": float(np.percentile(values, 99))}


def _engine(spec: Microserving, profile: str) -> Profile:
    """The scheduler is the published one's, whatever the coefficients are."""
    return msgspec.structs.replace(
        find_profile(profile), chunked_prefill_tokens=spec.chunked_prefill_tokens, mixed_chunk=spec.mixed_chunk
    )
