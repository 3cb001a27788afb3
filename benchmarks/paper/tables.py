"""From curves, goodput and claims to the tables of the report."""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.paper.claims import NEAR, Claim
from benchmarks.paper.curves import Curves
from benchmarks.paper.goodput import Goodput
from benchmarks.paper.goodput_claims import gain, slo_scale_gain
from benchmarks.paper.published import METRICS, PATTERNS, TITLES, Comparison, DistServe, Microserving, published_rps
from benchmarks.report import Section, number

METRIC_TITLES = {
    "ttft_mean_s": "mean TTFT, s",
    "ttft_p99_s": "P99 TTFT, s",
    "tpot_mean_s": "mean TPOT, ms",
    "tpot_p99_s": "P99 TPOT, ms",
    "jct_mean_s": "mean JCT, s",
    "jct_p99_s": "P99 JCT, s",
}
NO_REASON = "no reason found"
SPLIT_KINDS = ("disaggregated", "late")


def curve_section(spec: Microserving, hardware: str, ours: Curves, seeds: int, requests: int) -> Section:
    """Ours beside the published value, by metric, pattern and rate."""
    published = Curves(spec.rates_rps, spec.published).only(ours.rates_rps)
    rows = [
        [f"{METRIC_TITLES[metric]}: {TITLES[pattern]}", *_cells(metric, pattern, ours, published)]
        for metric in METRICS
        for pattern in PATTERNS
    ]
    errors = ", ".join(
        f"{METRIC_TITLES[metric][:-3].rstrip(',')} {error(ours, published, metric):.1%}" for metric in METRICS
    )
    described = spec.hardware[hardware]
    notes = [
        "Each cell: ours / published. Published values are read off a figure; one pixel is "
        f"{1e3 * spec.pixel['jct_mean_s']:.0f} ms of mean JCT, {1e3 * spec.pixel['ttft_mean_s']:.0f} ms of mean TTFT.",
        f"Hardware: {described.note}.",
        f"{requests} requests after {spec.warm_up} of warm-up, mean of {seeds} seed(s).",
        f"Mean error over patterns and rates: {errors}.",
        f"Mean JCT at {ours.rates_rps[-1]:g}/s from seed to seed: {_spread(ours)}.",
    ]
    return Section(
        title=f"LLM MicroServing on {described.title}",
        headers=["requests/s", *(f"{rate:g}" for rate in ours.rates_rps)],
        rows=rows,
        notes=notes,
    )


def error(ours: Curves, published: Curves, metric: str) -> float:
    """Mean relative error over patterns and rates."""
    pairs = [
        (one, other)
        for pattern in PATTERNS
        for one, other in zip(ours.values[pattern][metric], published.values[pattern][metric], strict=True)
    ]
    return float(np.mean([abs(one / other - 1) for one, other in pairs]))


def claim_section(title: str, claims: Sequence[Claim], reasons: Mapping[str, str]) -> Section:
    """Every claim with both figures; below, why those are not reproduced that are not."""
    rows = [[each.says, each.published, each.ours, each.verdict] for each in claims]
    missed = [each for each in claims if not each.reproduced]
    notes = [
        f"{len(claims) - len(missed)} of {len(claims)} reproduced. Figures count as reproduced with the published "
        f"direction and within {NEAR:.0%} of what was published, crossings within half a step of the rate.",
        *(f"Not reproduced, {reason}: {'; '.join(says)}." for reason, says in _by_reason(missed, reasons).items()),
    ]
    return Section(title=title, headers=["claim", "published", "ours", "verdict"], rows=rows, notes=notes)


def _by_reason(missed: Sequence[Claim], reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in missed:
        found.setdefault(reasons.get(each.key, NO_REASON), []).append(each.says)
    return found


def goodput_section(spec: DistServe, found: Sequence[Goodput], requests: int) -> Section:
    """Every system's goodput beside what was published for it."""
    rows = [
        _goodput_row(comparison, each)
        for comparison in spec.comparisons
        for each in found
        if each.comparison == comparison.name
    ]
    systems = {system.name: system.note for comparison in spec.comparisons for system in comparison.systems}
    split = {comparison.name: comparison.systems[0].note for comparison in spec.comparisons}
    notes = [
        f"Requests per second and GPU at which {spec.attainment:.0%} of {requests} requests meet both bounds, to 3 %. "
        "Idle: what meets them at 0.02/s/GPU. TTFT, TPOT: what meets each bound by itself at the goodput.",
        "SLO scale: the factor on both bounds that 90 % meet at the rate of the published comparison.",
        *(f"{name}: {note}." for name, note in systems.items() if name != SPLIT_KINDS[0]),
        *(f"disaggregated, {name}: {note}." for name, note in split.items()),
        *(f"{each.title}: {each.note}." for each in spec.lengths.values()),
    ]
    headers = ["workload and system", "GPUs", "ours", "published", "idle", "TTFT", "TPOT", "SLO scale"]
    return Section(title="DistServe: goodput per GPU", headers=headers, rows=rows, notes=notes)


def baseline_section(spec: DistServe, found: Sequence[Goodput]) -> Section:
    """What disaggregation gains over each baseline: what the comparison depends on."""
    rows = []
    for comparison in spec.comparisons:
        own = [each for each in found if each.comparison == comparison.name]
        split, late = (next(each for each in own if each.kind == kind) for kind in SPLIT_KINDS)
        rows += [
            [
                f"{comparison.name}, over {other.system}",
                times(gain(split, other)),
                times(slo_scale_gain(split, other)),
                times(gain(late, other)),
            ]
            for other in own
            if other.kind not in SPLIT_KINDS
        ]
    notes = [
        "Disaggregated relative to each collocated system; below 1 it is the worse, ∞ where the other keeps its "
        "bounds at no rate. The first row of each workload is "
        "the published comparison. The second takes the difference between the two engines' speed out of it, the third "
        "gives the collocated engine chunked prefill, which it did not have then.",
        "Last column: the gain if the decode engine answers with the first token, as Trimtab's engines do, and TTFT "
        "includes the hand-off. In DistServe the prefill engine does.",
    ]
    headers = ["gain", "rate", "tighter bounds", "rate, first token from decode"]
    return Section(title="DistServe: what the gain depends on", headers=headers, rows=rows, notes=notes)


def _spread(ours: Curves) -> str:
    ends = {pattern: (curves["jct_least_s"][-1], curves["jct_most_s"][-1]) for pattern, curves in ours.values.items()}
    return ", ".join(f"{TITLES[pattern]} {least:.2f} to {most:.2f} s" for pattern, (least, most) in ends.items())


def _cells(metric: str, pattern: str, ours: Curves, published: Curves) -> list[str]:
    scale = 1e3 if metric.startswith("tpot") else 1.0
    return [
        f"{number(scale * one)} / {number(scale * other)}"
        for one, other in zip(ours.values[pattern][metric], published.values[pattern][metric], strict=True)
    ]


def _goodput_row(comparison: Comparison, each: Goodput) -> list[str]:
    return [
        f"{comparison.name}: {each.system}",
        str(each.gpus),
        number(each.goodput_rps),
        number(published_rps(comparison, each.kind)),
        *(f"{share:.0%}" for share in (each.idle_attainment, each.ttft_attainment, each.tpot_attainment)),
        number(each.slo_scale),
    ]


def times(factor: float | None) -> str:
    return "∞" if factor is None else f"× {factor:.2f}"
