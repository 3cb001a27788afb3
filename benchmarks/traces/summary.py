"""From outcomes to tables, JSON and goals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.hindsight import BEST_STATIC, THRESHOLD
from benchmarks.adapt.outcome import Outcome
from benchmarks.adapt.statics import PATTERNS
from benchmarks.machine import versions
from benchmarks.report import Goal, Report, Section, at_least, number
from benchmarks.traces.catalog import FOLDER_VARIABLE, Trace
from benchmarks.traces.cells import POLICIES, Cell
from benchmarks.traces.scale import BEGIN_S, SHIFT_S
from benchmarks.traces.slos import LEVELS
from tuner.slo import DEFAULT_CLASS, SloTable

PACKAGES = ("trimtab", "numpy", "numba", "optuna", "scikit-learn")
NEAR = 0.98
"""Of the best static plan's goodput, which nobody knows beforehand."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from."""

    generated: bool
    skipped: int
    """Requests that do not fit into an engine."""
    requests: int
    """Those that do."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """All policies on one cell, on the same arrivals."""

    cell: Cell
    trace: Trace
    source: Source
    slos: SloTable
    requests: int
    outcomes: Mapping[str, Outcome]

    def goodput_rps(self, policy: str) -> float | None:
        outcome = self.outcomes.get(policy)
        return None if outcome is None else float(outcome.good.sum()) / self.cell.span_s

    def ratio(self, to: str) -> float | None:
        """Trimtab's goodput relative to another policy's; `None` if that has none."""
        own, other = self.goodput_rps(TRIMTAB), self.goodput_rps(to)
        return None if own is None or not other else own / other


def report(played: Sequence[Played], seed: int, machine: Mapping[str, Any]) -> Report:
    traces = _by_trace(played)
    return Report(
        benchmark="traces",
        seed=seed,
        versions=versions(PACKAGES),
        machine=machine,
        results=[row for each in played for row in results(each)],
        goals=[goal for title, own in traces.items() for goal in goals(title, own)],
        headline=[headline(title, own) for title, own in traces.items()],
        sections=[_section(title, own) for title, own in traces.items()],
    )


def goals(title: str, played: Sequence[Played]) -> list[Goal]:
    """Of one trace, over all its fleets and levels."""
    to_best = _mean(each.ratio(BEST_STATIC) for each in played)
    to_rule = _mean(each.ratio(THRESHOLD) for each in played)
    return [
        at_least(f"{title}: goodput of the best static plan's in hindsight, mean", to_best, NEAR),
        at_least(f"{title}: goodput of the threshold rule's, mean", to_rule, 1.0),
    ]


def headline(title: str, played: Sequence[Played]) -> str:
    to_best = _known(each.ratio(BEST_STATIC) for each in played)
    patterns = ", ".join(f"{name} {_times(_mean(each.ratio(name) for each in played))}" for name in PATTERNS)
    made = " (generated)" if any(each.source.generated for each in played) else ""
    return (
        f"{title}{made}: {_times(_mean(to_best))} the goodput of the best static plan in hindsight (least "
        f"{number(min(to_best, default=None))}), of the best plan of each pattern: {patterns}; of the threshold rule "
        f"{_times(_mean(each.ratio(THRESHOLD) for each in played))}"
    )


def results(each: Played) -> list[dict[str, Any]]:
    """For JSON: one row a policy."""
    slo = each.slos.classes[DEFAULT_CLASS]
    cell = {
        "trace": each.cell.trace,
        "generated": each.source.generated,
        "engines": each.cell.engines,
        "level": each.cell.level,
        "ttft_ms": slo.ttft_ms,
        "tpot_ms": slo.tpot_ms,
        "span_s": each.cell.span_s,
        "offered_rps": each.requests / each.cell.span_s,
    }
    return [
        {
            **cell,
            "policy": outcome.policy,
            "plan": outcome.plan,
            "goodput_rps": each.goodput_rps(outcome.policy),
            "attainment": outcome.attainment,
            "changes": [
                {"at_s": change.at_s, "reason": change.reason, "plan": change.plan} for change in outcome.changes
            ],
            "thought_s": outcome.thought_s,
        }
        for outcome in each.outcomes.values()
    ]


def _section(title: str, played: Sequence[Played]) -> Section:
    """One row a fleet and level: share of requests within the bounds by policy, and Trimtab beside the others."""
    headers = ["engines, SLO", "offered/s", *(f"{policy} %" for policy in POLICIES)]
    headers += ["× best static", "× threshold", "changes", "Trimtab's last plan", "best static plan"]
    return Section(
        title=title,
        headers=headers,
        rows=[_row(each) for each in played],
        notes=list(_notes(played)),
    )


def _row(each: Played) -> list[str]:
    trimtab, best = each.outcomes.get(TRIMTAB), each.outcomes.get(BEST_STATIC)
    return [
        f"{each.cell.engines}, {each.cell.level}",
        number(each.requests / each.cell.span_s),
        *(_attainment(each.outcomes.get(policy)) for policy in POLICIES),
        number(each.ratio(BEST_STATIC)),
        number(each.ratio(THRESHOLD)),
        "–" if trimtab is None else str(len(trimtab.changes)),
        "–" if trimtab is None else trimtab.plan,
        "–" if best is None else best.plan,
    ]


def _notes(played: Sequence[Played]) -> Iterator[str]:
    first = played[0]
    yield (
        f"Load generated with the statistics of this trace, for {FOLDER_VARIABLE} names no folder that holds it: "
        f"{first.trace.file}"
        if first.source.generated
        else f"The trace itself: {first.trace.file}"
    )
    yield f"{first.trace.source}; {first.trace.licence}"
    spans = ", ".join(dict.fromkeys(f"{each.cell.span_s:g} s on {each.cell.engines} engines" for each in played))
    yield (
        f"{first.trace.profile} engines; from second {BEGIN_S:g} of the trace on, {spans}. Copies of the slice lie over"
        f" each other, each moved by up to {SHIFT_S:g} s, until the load per engine is 0.8 of what the best plain "
        "static plan of four engines carries at this SLO level."
    )
    for level, slowdown in LEVELS.items():
        own = next((each for each in played if each.cell.level == level), None)
        if own is not None:
            slo = own.slos.classes[DEFAULT_CLASS]
            yield (
                f"{level}: TTFT {slo.ttft_ms:g} ms, TPOT {slo.tpot_ms:g} ms: {slowdown.ttft:g} and {slowdown.tpot:g} "
                "times what the 90th percentile request takes on an idle engine"
            )
    yield f"{first.source.skipped:,} of {first.source.skipped + first.source.requests:,} requests do not fit an engine"
    yield "% of requests within both bounds. Static plans and the rule have the best split of roles in hindsight."


def _by_trace(played: Sequence[Played]) -> dict[str, list[Played]]:
    titles = dict.fromkeys(each.trace.title for each in played)
    return {title: [each for each in played if each.trace.title == title] for title in titles}


def _attainment(outcome: Outcome | None) -> str:
    return "–" if outcome is None else f"{100 * outcome.attainment:.1f}"


def _times(value: float | None) -> str:
    return f"× {number(value)}"


def _known(values: "Sequence[float | None] | Iterator[float | None]") -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: "Sequence[float | None] | Iterator[float | None]") -> float | None:
    known = _known(values)
    return float(np.mean(known)) if known else None
