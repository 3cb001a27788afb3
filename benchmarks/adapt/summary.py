"""From outcomes to tables, JSON and goals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.hindsight import BEST_STATIC, ORACLE
from benchmarks.adapt.jobs import POLICIES
from benchmarks.adapt.outcome import TICK_S, Outcome, reached_s, series
from benchmarks.adapt.scenarios import Scenario
from benchmarks.machine import versions
from benchmarks.report import Goal, Report, Section, at_least, at_most, number
from tuner.workload import Floats

HOUR_S = 3600.0
SERIES_S = 60.0
"""Steps of the series in JSON."""
PACKAGES = ("trimtab", "numpy", "numba", "optuna", "scikit-learn")


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """All policies on one scenario, on the same arrivals."""

    scenario: Scenario
    arrived_s: Floats
    outcomes: Mapping[str, Outcome]

    def goodput_rps(self, policy: str) -> float | None:
        outcome = self.outcomes.get(policy)
        return None if outcome is None else float(outcome.good.sum()) / self.scenario.span_s

    def ratio(self, policy: str, to: str) -> float | None:
        """Goodput relative to another policy's; `None` if either was not run or there is nothing to divide by."""
        own, other = self.goodput_rps(policy), self.goodput_rps(to)
        return None if own is None or not other else own / other

    def reached_s(self, policy: str) -> list[float]:
        """For each phase, seconds until the policy is near the oracle; the first is the start, from cold."""
        outcome, oracle = self.outcomes.get(policy), self.outcomes.get(ORACLE)
        if outcome is None or oracle is None:
            return []
        starts = [*self.scenario.starts_s, self.scenario.span_s]
        return [
            reached_s(outcome.good, oracle.good, self.arrived_s, begin_s, end_s) for begin_s, end_s in pairwise(starts)
        ]

    @property
    def needless_changes(self) -> int | None:
        """Where the traffic never moves, every change but the first is needless; `None` elsewhere."""
        outcome = self.outcomes.get(TRIMTAB)
        if outcome is None or self.scenario.shifts:
            return None
        return max(0, len(outcome.changes) - 1)


def report(compared: Sequence[Compared], seed: int, machine: Mapping[str, Any]) -> Report:
    return Report(
        benchmark="adapt",
        seed=seed,
        versions=versions(PACKAGES),
        machine=machine,
        results=[row for each in compared for row in results(each)],
        goals=goals(compared),
        headline=headline(compared),
        sections=[overview(compared), *(section(each) for each in compared)],
    )


def goals(compared: Sequence[Compared]) -> list[Goal]:
    shifting = [each for each in compared if each.scenario.shifts]
    stationary = [each for each in compared if not each.scenario.shifts]
    to_oracle = _known([each.ratio(TRIMTAB, ORACLE) for each in shifting])
    to_static = _known([each.ratio(TRIMTAB, BEST_STATIC) for each in shifting])
    at_rest = _known([each.ratio(TRIMTAB, BEST_STATIC) for each in stationary])
    ticks = [seconds / TICK_S for each in shifting for seconds in each.reached_s(TRIMTAB)[1:]]
    return [
        at_least("goodput of the oracle's, mean of the shifting scenarios", _mean(to_oracle), 0.95),
        at_least("goodput of the best static plan's, mean of the shifting scenarios", _mean(to_static), 1.3),
        at_least(
            "goodput of the best static plan's, least of the stationary scenarios", min(at_rest, default=None), 0.98
        ),
        at_most("ticks to 90 % of the oracle after a shift, median", _median(ticks), 3),
        at_most("needless plan changes per simulated hour of stationary traffic", _needless_per_h(stationary), 1),
    ]


def headline(compared: Sequence[Compared]) -> list[str]:
    """Goodput relative to the best static plan and the oracle, by whether the traffic moves."""
    kinds = {
        "traffic that moves": [each for each in compared if each.scenario.shifts],
        "traffic that does not": [each for each in compared if not each.scenario.shifts],
    }
    return [sentence for kind, own in kinds.items() for sentence in _of_kind(kind, own)]


def _of_kind(kind: str, compared: Sequence[Compared]) -> Iterator[str]:
    to_static = _known([each.ratio(TRIMTAB, BEST_STATIC) for each in compared])
    to_oracle = _known([each.ratio(TRIMTAB, ORACLE) for each in compared])
    if to_static and to_oracle:
        yield (
            f"{kind[0].upper()}{kind[1:]} ({len(to_static)} scenarios): × {number(_mean(to_static))} the best static "
            f"plan's goodput ({number(min(to_static))} to {number(max(to_static))}), {_percent(_mean(to_oracle))} of "
            "the oracle's"
        )


def overview(compared: Sequence[Compared]) -> Section:
    """One row a scenario."""
    rows = []
    for each in compared:
        outcome = each.outcomes.get(TRIMTAB)
        rows.append(
            [
                each.scenario.name,
                number(each.goodput_rps(TRIMTAB)),
                _percent(None if outcome is None else outcome.attainment),
                _percent(each.ratio(TRIMTAB, ORACLE)),
                number(each.ratio(TRIMTAB, BEST_STATIC)),
                _seconds(each.reached_s(TRIMTAB)),
                "–" if outcome is None else str(len(outcome.changes)),
            ]
        )
    headers = ["scenario", "goodput/s", "attainment", "of oracle", "× best static", "to 90 % of oracle, s", "changes"]
    notes = [
        "Seconds to 90 % of the oracle's goodput: from the cold start, then after each shift; – for never within the "
        f"phase. A tick is {TICK_S:g} s.",
        "The oracle runs the best plan of each phase on that phase alone, from idle. It is the best of an exhaustive "
        "grid of fixed plans, screened with the twin and measured in the reference simulator.",
    ]
    return Section(title="Trimtab by scenario", headers=headers, rows=rows, notes=notes)


def section(each: Compared) -> Section:
    """All policies on one scenario."""
    rows = [_row(each, each.outcomes[policy]) for policy in POLICIES if policy in each.outcomes]
    headers = ["policy", "goodput/s", "attainment", "of oracle", "to 90 % of oracle, s", "changes", "plan"]
    scenario = each.scenario
    fleet = f"{scenario.engines.count} × {scenario.profile.name}"
    bounds = "; ".join(f"{name} {slo.ttft_ms:g}/{slo.tpot_ms:g} ms" for name, slo in _own_classes(each).items())
    phases = ", ".join(f"{phase.traffic} {phase.rate_rps:g}/s" for phase in scenario.phases)
    notes = [f"{fleet}; TTFT/TPOT bounds {bounds}; {phases}; {len(each.arrived_s):,} requests in {scenario.span_s:g} s"]
    return Section(title=f"{scenario.title} ({scenario.name})", headers=headers, rows=rows, notes=notes)


def results(each: Compared) -> list[dict[str, Any]]:
    """For JSON: one row a policy."""
    return [_result(each, outcome) for outcome in each.outcomes.values()]


def _result(each: Compared, outcome: Outcome) -> dict[str, Any]:
    return {
        "scenario": each.scenario.name,
        "shifting": each.scenario.shifts,
        "policy": outcome.policy,
        "plan": outcome.plan,
        "goodput_rps": each.goodput_rps(outcome.policy),
        "attainment": outcome.attainment,
        "of_oracle": each.ratio(outcome.policy, ORACLE),
        "of_best_static": each.ratio(outcome.policy, BEST_STATIC),
        "reached_s": [None if math.isinf(seconds) else seconds for seconds in each.reached_s(outcome.policy)],
        "changes": [
            {"at_s": change.at_s, "reason": change.reason, "plan": change.plan, "sentence": change.sentence}
            for change in outcome.changes
        ],
        "thought_s": outcome.thought_s,
        "goodput_by_minute_rps": series(outcome.good, each.arrived_s, each.scenario.span_s, SERIES_S).round(1).tolist(),
    }


def _row(each: Compared, outcome: Outcome) -> list[str]:
    return [
        outcome.policy,
        number(each.goodput_rps(outcome.policy)),
        _percent(outcome.attainment),
        _percent(each.ratio(outcome.policy, ORACLE)),
        _seconds(each.reached_s(outcome.policy)),
        str(len(outcome.changes)),
        outcome.plan,
    ]


def _own_classes(each: Compared) -> Mapping[str, Any]:
    classes = dict(each.scenario.slos.classes)
    return {name: slo for name, slo in classes.items() if name != "default" or len(classes) == 1}


def _needless_per_h(stationary: Sequence[Compared]) -> float | None:
    counted = [(each.needless_changes, each.scenario.span_s) for each in stationary]
    known = [(changes, span_s) for changes, span_s in counted if changes is not None]
    if not known:
        return None
    return sum(changes for changes, _ in known) / (sum(span_s for _, span_s in known) / HOUR_S)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _seconds(values: Sequence[float]) -> str:
    return ", ".join("–" if math.isinf(value) else f"{value:g}" for value in values) or "–"
