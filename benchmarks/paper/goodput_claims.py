"""The claims of DistServe's comparison, checked on goodput."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.paper.claims import Claim, near
from benchmarks.paper.goodput import Goodput
from benchmarks.paper.published import Comparison

SAME_ATTAINMENT = 0.05
"""Mean difference between two curves that are the same: a point of the published ones is of 50 to 100 requests."""


def claims(comparison: Comparison, found: Mapping[str, Goodput]) -> list[Claim]:
    """`found` is by kind of system."""
    split, baseline, published = found["disaggregated"], found["baseline"], comparison.published
    rate_gain, slo_gain = gain(split, baseline), slo_scale_gain(split, baseline)
    return [
        *_curve(comparison, baseline),
        _level(comparison, "disaggregated", split.goodput_rps, published.disaggregated_rps),
        _level(comparison, "baseline", baseline.goodput_rps, published.baseline_rps),
        _factor(
            comparison, "rate gain", "disaggregated sustains … times the rate per GPU", rate_gain, published.rate_gain
        ),
        _factor(
            comparison,
            "SLO gain",
            f"disaggregated keeps … times tighter bounds at {comparison.slo_rate_rps:g}/s/GPU",
            slo_gain,
            published.slo_gain,
        ),
    ]


def gain(split: Goodput, other: Goodput) -> float | None:
    """Goodput of the first relative to the second; `None` if the second never keeps its bounds."""
    return split.goodput_rps / other.goodput_rps if other.goodput_rps else None


def slo_scale_gain(split: Goodput, other: Goodput) -> float:
    """How much tighter the first's bounds may be."""
    return other.slo_scale / split.slo_scale


def _curve(comparison: Comparison, baseline: Goodput) -> Iterator[Claim]:
    """The baseline's attainment over all rates, where that was printed."""
    curve = comparison.published.baseline_attained
    if curve is None:
        return
    off = [abs(own - other) for own, other in zip(baseline.as_published, curve.shares, strict=True)]
    mean = sum(off) / len(off)
    yield Claim(
        key=f"{comparison.name} curve",
        says=f"{comparison.name}: vLLM's attainment at {curve.rates_rps[0]:g} to {curve.rates_rps[-1]:g}/s/GPU",
        published=_percentages(curve.shares),
        ours=_percentages(baseline.as_published),
        reproduced=mean <= SAME_ATTAINMENT,
    )


def _percentages(shares: Sequence[float]) -> str:
    return f"{', '.join(f'{100 * share:.0f}' for share in shares)} %"


def _level(comparison: Comparison, kind: str, ours: float, published: float) -> Claim:
    return Claim(
        key=f"{comparison.name} {kind}",
        says=f"{comparison.name}: goodput of {'disaggregated' if kind == 'disaggregated' else 'vLLM'}",
        published=f"{published:.2f}/s/GPU",
        ours=f"{ours:.2f}/s/GPU",
        reproduced=near(ours, published),
    )


def _factor(comparison: Comparison, key: str, says: str, ours: float | None, published: float) -> Claim:
    """A factor at or below 1 has the wrong direction, however near it is."""
    return Claim(
        key=f"{comparison.name} {key}",
        says=f"{comparison.name}: {says}",
        published=f"× {published:.2f}",
        ours=_told(ours, published),
        reproduced=ours is not None and ours > 1 and near(ours, published),
    )


def _told(ours: float | None, published: float) -> str:
    """With the direction, and how far off the figure is."""
    if ours is None:
        return "direction yes: vLLM keeps the bounds at no rate"
    off = max(ours, published) / min(ours, published)
    return f"× {ours:.2f}: direction {'yes' if ours > 1 else 'no'}, figure off by × {off:.2f}"
