"""The twin beside the reference simulator, on the traffic of every scenario under one plan of each family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.adapt.generate import phases
from benchmarks.adapt.scenarios import Scenario
from benchmarks.twin.plans import PLANS
from tuner.twin.fast import simulate
from tuner.twin.forecast import good_requests
from tuner.twin.reference import simulate_reference
from tuner.twin.types import Ending, Timeline
from tuner.workload import Floats, Workload

PERCENTILES = (50.0, 90.0, 99.0)
SAME_S = 1e-6
"""Times nearer than this are the same time."""
LEAST_GOOD = 0.05
"""Goodput errors are relative to the reference's goodput, or to this share of what was offered if that is more."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One phase of a scenario under one plan. Errors are relative, percentiles 50, 90 and 99."""

    scenario: str
    phase: int
    plan: str
    requests: int
    attainment: float
    """In the reference."""
    goodput_error: float
    ttft_errors: Sequence[float]
    tpot_errors: Sequence[float]
    same: float
    """Share of requests with the same fate at the same times in both."""


def compare(scenario: Scenario, most_requests: int, seed: int) -> Iterator[Comparison]:
    """Every phase by itself, from idle and cut to so many requests."""
    for number, whole in enumerate(phases(scenario, seed)):
        work = shortened(whole, most_requests)
        if not len(work):
            continue
        for plan in PLANS:
            yield _compared(scenario, number, plan, work)


def shortened(work: Workload, most_requests: int) -> Workload:
    return work if len(work) <= most_requests else work.until(float(work.arrived_s[most_requests]))


def _compared(scenario: Scenario, phase: int, title: str, work: Workload) -> Comparison:
    fleet, slos = scenario.fleet, scenario.slos
    plan = PLANS[title](fleet)
    reference, found = (simulator(work, fleet, plan, slos) for simulator in (simulate_reference, simulate))
    expected = int(good_requests(work, reference, slos).sum())
    good = int(good_requests(work, found, slos).sum())
    return Comparison(
        scenario=scenario.name,
        phase=phase,
        plan=title,
        requests=len(work),
        attainment=expected / len(work),
        goodput_error=abs(good - expected) / max(expected, LEAST_GOOD * len(work)),
        ttft_errors=errors(found.ttft_s, reference.ttft_s),
        tpot_errors=errors(found.tpot_s, reference.tpot_s),
        same=same_share(found, reference),
    )


def errors(found: Floats, expected: Floats) -> list[float]:
    """Relative errors of the percentiles; 0 where neither simulator has any value."""
    pair = [values[~np.isnan(values)] for values in (found, expected)]
    if not len(pair[0]) or not len(pair[1]):
        return [float(len(pair[0]) != len(pair[1]))] * len(PERCENTILES)
    high, low = (np.percentile(values, PERCENTILES) for values in pair)
    return [float(abs(one - other) / other) for one, other in zip(high, low, strict=True)]


def same_share(found: Timeline, expected: Timeline) -> float:
    fate = (found.ending == expected.ending) & (np.abs(found.e2e_s - expected.e2e_s) < SAME_S)
    served = expected.ending == Ending.OK
    start = ~served | (np.abs(found.ttft_s - expected.ttft_s) < SAME_S)
    return float((fate & start).mean())
