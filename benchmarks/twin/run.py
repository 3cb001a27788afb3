"""`python -m benchmarks twin`: measures, and puts the tables together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.adapt.scenarios import load_scenario, scenario_names
from benchmarks.machine import describe, versions
from benchmarks.report import Goal, Report, Section, at_least, at_most, number
from benchmarks.twin.fidelity import LEAST_GOOD, Comparison, compare
from benchmarks.twin.speed import OUTPUT_TOKENS, PROMPT_TOKENS, Speed, compile_s, measure
from tuner.twin.fast import simulate
from tuner.twin.reference import simulate_reference

SIZES = (2, 16, 128, 1024)
REFERENCE_SIZES = (2, 16)
GOAL_ENGINES = 16
GOAL_RPS = 100_000.0
GOAL_ERROR = 0.03
PACKAGES = ("trimtab", "numpy", "numba", "llvmlite")


@dataclass(frozen=True, slots=True)
class TwinOptions:
    seed: int
    requests: int
    """Simulated for each speed."""
    rounds: int
    compared: int
    """Most requests of each phase that both simulators run."""
    scenarios: Sequence[str]


QUICK = TwinOptions(seed=1, requests=20_000, rounds=1, compared=300, scenarios=("summaries", "conversations", "bursts"))
FULL = TwinOptions(seed=1, requests=100_000, rounds=3, compared=2_000, scenarios=tuple(scenario_names()))


def run_twin(options: TwinOptions) -> Report:
    machine = describe()
    ready_s = compile_s()
    speeds = [
        each
        for size in SIZES
        for each in measure("twin", simulate, size, options.requests, options.rounds, options.seed)
    ]
    for size in REFERENCE_SIZES:
        speeds += measure("reference", simulate_reference, size, options.requests // 20, 1, options.seed)
    comparisons = [
        each for name in options.scenarios for each in compare(load_scenario(name), options.compared, options.seed)
    ]
    return report(speeds, comparisons, ready_s, options.seed, machine)


def report(
    speeds: Sequence[Speed], comparisons: Sequence[Comparison], ready_s: float, seed: int, machine: dict[str, str]
) -> Report:
    return Report(
        benchmark="twin",
        seed=seed,
        versions=versions(PACKAGES),
        machine=machine,
        results=[*map(speed_result, speeds), *map(asdict, comparisons)],
        goals=goals(speeds, comparisons),
        headline=headline(speeds, comparisons),
        sections=[speed_section(speeds, ready_s), fidelity_section(comparisons)],
    )


def goals(speeds: Sequence[Speed], comparisons: Sequence[Comparison]) -> list[Goal]:
    rate = f"simulated requests/s of one core at {GOAL_ENGINES} engines"
    return [
        at_least(rate, _least_rps(speeds, "twin"), GOAL_RPS),
        at_most("error of goodput, worst of all scenarios and plans", _worst(comparisons), GOAL_ERROR),
    ]


def headline(speeds: Sequence[Speed], comparisons: Sequence[Comparison]) -> list[str]:
    twin_rps, reference_rps = _least_rps(speeds, "twin"), _least_rps(speeds, "reference")
    worst = _worst(comparisons)
    found = []
    if twin_rps is not None and reference_rps is not None:
        found.append(
            f"{number(twin_rps)} simulated requests/s on one core at {GOAL_ENGINES} engines; the reference simulator "
            f"{number(reference_rps)}"
        )
    if worst is not None:
        found.append(f"Goodput within {_percent(worst)} of the reference's in {len(comparisons)} comparisons")
    return found


def _least_rps(speeds: Sequence[Speed], simulator: str) -> float | None:
    """Of the slowest plan, at the size that the goal is about."""
    own = [each.requests_per_s for each in speeds if each.engines == GOAL_ENGINES and each.simulator == simulator]
    return min(own, default=None)


def _worst(comparisons: Sequence[Comparison]) -> float | None:
    return max((each.goodput_error for each in comparisons), default=None)


def speed_result(speed: Speed) -> dict[str, Any]:
    return asdict(speed) | {"requests_per_s": speed.requests_per_s}


def speed_section(speeds: Sequence[Speed], ready_s: float) -> Section:
    headers = ["simulator and plan", *(f"{size:,} engines" for size in SIZES)]
    titles = dict.fromkeys((each.simulator, each.plan) for each in speeds)
    found = {(each.simulator, each.plan, each.engines): each.requests_per_s for each in speeds}
    rows = [
        [f"{simulator}, {plan}", *(number(found.get((simulator, plan, size))) for size in SIZES)]
        for simulator, plan in titles
    ]
    notes = [
        f"Requests of about {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens; CPU time of one core, best run.",
        f"Ready after {ready_s:.1f} s: compiling the first time, loading from disk later.",
    ]
    return Section(title="Simulated requests per second", headers=headers, rows=rows, notes=notes)


def fidelity_section(comparisons: Sequence[Comparison]) -> Section:
    """One row a scenario: the worst of its phases and plans."""
    names = dict.fromkeys(each.scenario for each in comparisons)
    rows = [_fidelity_row(name, [each for each in comparisons if each.scenario == name]) for name in names]
    headers = ["scenario", "requests", "goodput", *_titles("TTFT"), *_titles("TPOT"), "same"]
    notes = [
        "Errors against the reference simulator, the worst of a scenario's phases and plans. Goodput's is relative to "
        f"the reference's, or to {LEAST_GOOD:.0%} of what was offered if that is more.",
        "Same: the share of all requests that end in the same way at the same times in both, to the microsecond.",
    ]
    return Section(title="Errors by scenario", headers=headers, rows=rows, notes=notes)


def _titles(metric: str) -> list[str]:
    return [f"{metric} p{percentile}" for percentile in (50, 90, 99)]


def _fidelity_row(name: str, own: Sequence[Comparison]) -> list[str]:
    ttft = np.max([each.ttft_errors for each in own], axis=0)
    tpot = np.max([each.tpot_errors for each in own], axis=0)
    same = np.average([each.same for each in own], weights=[each.requests for each in own])
    return [
        name,
        f"{sum(each.requests for each in own):,}",
        _percent(max(each.goodput_error for each in own)),
        *map(_percent, (*ttft, *tpot)),
        _percent(float(same)),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
