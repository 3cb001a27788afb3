"""The figures of `sglang-interference` as tables."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from benchmarks.machine import versions
from benchmarks.real_engines import PACKAGES
from benchmarks.report import Report, Section, at_most, number

CALM_OF_DATA_PARALLEL = 0.25
"""How much of data parallel's worst pause may be left when another engine prefills."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One long prompt that met running streams."""

    stack: str
    round: int
    quiet_gaps_s: Sequence[float]
    """Pauses between the streams' tokens before it came."""
    worst_gap_s: float
    """The longest pause of any of them until its first token."""
    ttft_s: float


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt on an idle stack; the first two from its being sent."""

    stack: str
    round: int
    ttft_s: float
    second_token_s: float
    tpot_s: float


def report(
    samples: Sequence[Sample],
    idle: Sequence[Idle],
    stacks: Sequence[str],
    seed: int,
    machine: Mapping[str, str],
    skipped: Mapping[str, str],
) -> Report:
    rows = [_figures(name, samples, idle) for name in stacks if name not in skipped]
    worst = {row["stack"]: row["worst_gap_ms"] for row in rows}
    share = _ratio(worst.get("disaggregated"), worst.get("data_parallel"))
    return Report(
        benchmark="sglang-interference",
        seed=seed,
        versions=versions(PACKAGES),
        machine=machine,
        results=rows,
        goals=[at_most("worst pause, disaggregated over data_parallel", share, CALM_OF_DATA_PARALLEL)],
        skipped=skipped,
        headline=headline(rows),
        sections=[_arrival(rows), _idle(rows)],
    )


def headline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    pauses = [f"{number(row['worst_gap_ms'])} ms ({row['stack']})" for row in rows if row["worst_gap_ms"] is not None]
    return [f"A prompt of 1,500 tokens stops running streams for: {'; '.join(pauses)}"] if pauses else []


def _figures(name: str, samples: Sequence[Sample], idle: Sequence[Idle]) -> dict[str, Any]:
    met = [one for one in samples if one.stack == name]
    alone = [one for one in idle if one.stack == name]
    return {
        "stack": name,
        "quiet_gap_ms": _ms(gap for one in met for gap in one.quiet_gaps_s),
        "worst_gap_ms": _ms(one.worst_gap_s for one in met),
        "worst_gap_max_ms": max((one.worst_gap_s * 1000 for one in met), default=None),
        "ttft_ms": _ms(one.ttft_s for one in met),
        "idle_ttft_ms": _ms(one.ttft_s for one in alone),
        "idle_second_token_ms": _ms(one.second_token_s for one in alone),
        "idle_tpot_ms": _ms(one.tpot_s for one in alone),
    }


def _arrival(rows: Sequence[Mapping[str, Any]]) -> Section:
    names = ("quiet_gap_ms", "worst_gap_ms", "worst_gap_max_ms", "ttft_ms")
    return Section(
        title="A prompt of 1,500 tokens meets four streams, ms",
        headers=["stack", "gap before", "worst gap", "worst of all rounds", "TTFT of the prompt"],
        rows=[[row["stack"], *(number(row[name]) for name in names)] for row in rows],
        notes=["Medians of the rounds. The worst gap is of all four streams, until the prompt has its first token."],
    )


def _idle(rows: Sequence[Mapping[str, Any]]) -> Section:
    names = ("idle_ttft_ms", "idle_second_token_ms", "idle_tpot_ms")
    return Section(
        title="A prompt of 1,000 tokens and 20 to generate on an idle stack, ms",
        headers=["stack", "TTFT", "second token", "TPOT"],
        rows=[[row["stack"], *(number(row[name]) for name in names)] for row in rows],
    )


def _ms(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) * 1000 if found else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference
