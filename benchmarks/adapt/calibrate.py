"""How the rates in the data files were found: `python -m benchmarks.adapt.calibrate [SCENARIO ...]` prints them.

The highest rate of a phase is the one at which some fixed plan, out of every pattern with every policy, ratio and
split of roles, still serves `TARGET` of the requests within their bounds. A phase gets `LOAD` of that: near what the
fleet can do if it is used well, and mostly beyond what it can do if it is not.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.adapt.generate import phase_workload
from benchmarks.adapt.scenarios import Phase, Scenario, load_scenario, scenario_names
from benchmarks.adapt.statics import Scored, describe, patterns, score
from tuner.twin.fast import simulate
from tuner.types import Candidate

TARGET = 0.97
LOAD = 0.9
SPAN_S = 120.0
LEAST_REQUESTS = 400
STEP = 1.25
"""Factor between the first rates tried."""
PRECISION = 0.04


def fitting_rate(scenario: Scenario, phase: Phase, seed: int) -> tuple[float, Scored]:
    """The rate for the data file, to two digits, and the plan that serves it best."""
    everything = list(patterns(scenario.fleet))
    low, high = phase.rate_rps, STEP * phase.rate_rps
    while not (able := _able(scenario, phase, low, everything, seed)):
        low, high = low / STEP, low
    while found := _able(scenario, phase, high, able, seed):
        able, low, high = found, high, STEP * high
    while high - low > PRECISION * high:
        rate_rps = (low + high) / 2
        if found := _able(scenario, phase, rate_rps, able, seed):
            able, low = found, rate_rps
        else:
            high = rate_rps
    rate_rps = float(f"{LOAD * low:.2g}")
    return rate_rps, _ranked(scenario, phase, rate_rps, able, seed)[0]


def _able(
    scenario: Scenario, phase: Phase, rate_rps: float, candidates: Sequence[Candidate], seed: int
) -> list[Candidate]:
    """Those that serve the target at this rate; the others cannot at a higher one."""
    ranked = _ranked(scenario, phase, rate_rps, candidates, seed)
    return [each.candidate for each in ranked if each.attainment >= TARGET]


def _ranked(
    scenario: Scenario, phase: Phase, rate_rps: float, candidates: Sequence[Candidate], seed: int
) -> list[Scored]:
    span_s = max(SPAN_S, LEAST_REQUESTS / rate_rps)
    tried = msgspec.structs.replace(phase, rate_rps=rate_rps, duration_s=span_s)
    workload = phase_workload(scenario, tried, np.random.default_rng(seed))
    return score(candidates, workload, scenario.fleet, scenario.slos, simulate)


def rates(scenario: Scenario, seed: int) -> Iterator[tuple[Phase, float, Scored]]:
    """For each kind of traffic in a scenario once."""
    for name in dict.fromkeys(phase.traffic for phase in scenario.phases):
        phase = next(phase for phase in scenario.phases if phase.traffic == name)
        yield phase, *fitting_rate(scenario, phase, seed)


def main(scenarios: Annotated[list[str] | None, typer.Argument(show_default="all")] = None, seed: int = 1) -> None:
    """Print the rate of each phase and the plan that serves it."""
    for name in scenarios or scenario_names():
        for phase, rate_rps, best in rates(load_scenario(name), seed):
            served = f"{describe(best.candidate)} serves {best.attainment:.1%}"
            print(f"{name}: {phase.traffic} {rate_rps:g}/s (was {phase.rate_rps:g}): {served}", flush=True)


if __name__ == "__main__":
    typer.run(main)
