"""Simulated requests per second of one core, by size of the fleet."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.twin.plans import data_parallel, disaggregated
from engines.emulated.profile import load_profile
from tuner.plan import Plan
from tuner.slo import BOOTSTRAP_SLOS
from tuner.twin.fast import simulate
from tuner.twin.types import Fleet, Simulator, TwinEngine
from tuner.workload import Workload

PROFILE = "h100-tp4-llama-3.1-70b"
PROMPT_TOKENS, OUTPUT_TOKENS, SPREAD = 500, 100, 0.5
RATE_RPS = 8.0
"""Per engine: about two thirds of what a split fleet of these can carry."""
TRANSFERS = 64
"""With eight at a time, the few engines that one router ranks could not take what a large fleet prefills."""

PLANS: dict[str, Callable[[Fleet], Plan]] = {
    "data parallel": data_parallel,
    "disaggregated": lambda fleet: disaggregated(fleet, max_inflight_transfers=TRANSFERS),
}


@dataclass(frozen=True, slots=True)
class Speed:
    """CPU time, the best of several runs: what other processes do to a core's caches is not the twin's."""

    simulator: str
    plan: str
    engines: int
    requests: int
    cpu_s: float

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.cpu_s


def measure(name: str, simulator: Simulator, engines: int, requests: int, rounds: int, seed: int) -> list[Speed]:
    """One plan after the other on the same requests."""
    fleet = [TwinEngine(f"e{number}", load_profile(PROFILE)) for number in range(engines)]
    work = independent_requests(requests, RATE_RPS * engines, seed)
    return [
        Speed(name, title, engines, requests, min(_cpu_s(simulator, work, fleet, make(fleet)) for _ in range(rounds)))
        for title, make in PLANS.items()
    ]


def independent_requests(count: int, rate_rps: float, seed: int) -> Workload:
    """Poisson arrivals, log-normal lengths, nothing shared."""
    rng = np.random.default_rng(seed)
    arrived_s = np.cumsum(rng.exponential(1 / rate_rps, count))
    zeros = np.zeros(count, dtype=np.int64)

    def lengths(median: float) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.maximum(1, median * np.exp(SPREAD * rng.standard_normal(count))).astype(np.int64)

    return Workload(
        span_s=float(arrived_s[-1]) + 1 / rate_rps,
        classes=("default",),
        arrived_s=arrived_s,
        prompt_tokens=lengths(PROMPT_TOKENS),
        output_tokens=lengths(OUTPUT_TOKENS),
        slo_class=zeros,
        session=np.arange(count),
        root=zeros,
        root_tokens=zeros,
    )


def compile_s() -> float:
    """Wall seconds until the twin has run for the first time: compiling, or loading what was compiled before."""
    begun_s = time.perf_counter()
    work = independent_requests(1, 1.0, 0)
    fleet = [TwinEngine("e0", load_profile(PROFILE))]
    simulate(work, fleet, data_parallel(fleet), BOOTSTRAP_SLOS)
    return time.perf_counter() - begun_s


def _cpu_s(simulator: Simulator, work: Workload, fleet: Fleet, plan: Plan) -> float:
    begun_s = time.process_time()
    simulator(work, fleet, plan, BOOTSTRAP_SLOS)
    return time.process_time() - begun_s
