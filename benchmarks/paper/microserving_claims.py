"""The claims of the MicroServing evaluation, checked on curves: those of its text, and those that its figure makes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.paper.claims import Claim, near
from benchmarks.paper.curves import Curves
from benchmarks.paper.published import TITLES, Microserving

JCT = "jct_mean_s"
SPLIT_FORMS = ("disaggregated", "balanced")
CROSSINGS = (
    ("tp8", "disaggregated"),
    ("tp8", "balanced"),
    ("tp8", "data_parallel"),
    ("disaggregated", "balanced"),
    ("disaggregated", "data_parallel"),
)
"""The first is lower at low rates, the second at high ones."""
SAME_CROSSING_RPS = 0.4
"""Half of the published step between rates."""
BALANCED_FROM_RPS = 4.8
FLAT = 1.15
"""A curve that ends at most so much above its start is flat."""
GROWS = 1.4
FLAT_S = (0.0125, 0.0145)
"""13 to 14 ms, rounded."""
EXPLODES = 2.0
"""TTFT at the highest rate relative to that at 4 requests/s."""
EXPLODES_FROM_RPS = 4.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What is compared: the same rates on both sides."""

    spec: Microserving
    published: Curves
    ours: Curves


def claims(spec: Microserving, ours: Curves) -> list[Claim]:
    """Every claim that the simulated rates allow to be checked."""
    whole = Curves(spec.rates_rps, spec.published)
    checked = Checked(spec, whole.only(ours.rates_rps), ours)
    return [
        *rankings(checked),
        *crossings(checked),
        tp8_at_low_rates(checked),
        *disaggregation_gains(checked),
        balanced_at_high_rates(checked),
        flat_tpot(checked),
        growing_tpot(checked),
        exploding_ttft(checked),
        balanced_lessens(checked),
    ]


def rankings(checked: Checked) -> Iterator[Claim]:
    """The order of the patterns at each rate. Two that are published within a pixel of each other are a tie."""
    pixel_s = checked.spec.pixel[JCT]
    for rate in checked.ours.rates_rps:
        published, ours = checked.published.ranking(JCT, rate), checked.ours.ranking(JCT, rate)
        flipped = [
            (first, second)
            for first, second in combinations(published, 2)
            if ours.index(first) > ours.index(second)
            and checked.published.at(second, JCT, rate) - checked.published.at(first, JCT, rate) > pixel_s
        ]
        yield Claim(
            key=f"ranking at {rate:g}",
            says=f"ranking by mean JCT at {rate:g}/s",
            published=_order(checked.published, published, rate),
            ours=_order(checked.ours, ours, rate),
            reproduced=not flipped,
        )


def crossings(checked: Checked) -> Iterator[Claim]:
    """Where the better of two patterns changes, by mean JCT."""
    for before, after in CROSSINGS:
        published = checked.published.crossing_rps(JCT, before, after)
        ours = checked.ours.crossing_rps(JCT, before, after)
        both = published is not None and ours is not None and abs(published - ours) <= SAME_CROSSING_RPS
        yield Claim(
            key=f"crossing {before} {after}",
            says=f"{TITLES[after]} beats {TITLES[before]} from … on",
            published=_rate(published),
            ours=_rate(ours),
            reproduced=both or (published is None and ours is None),
        )


def tp8_at_low_rates(checked: Checked) -> Claim:
    """Against the best of the others at the lowest rate."""
    rate = checked.ours.rates_rps[0]

    def gain(curves: Curves) -> float:
        best = next(each for each in curves.ranking(JCT, rate) if each != "tp8")
        return curves.gain(JCT, "tp8", best, rate)

    text = checked.spec.text.tp8_mean_jct
    return Claim(
        key="tp8",
        says=f"one TP 8 engine has up to {text:.0%} lower mean JCT than any other at {rate:g}/s",
        published=f"{text:.0%} (curves {gain(checked.published):.1%})",
        ours=f"{gain(checked.ours):.1%}",
        reproduced=near(gain(checked.ours), text),
    )


def disaggregation_gains(checked: Checked) -> Iterator[Claim]:
    """Against data parallel, at the best rate, of plain or balanced disaggregation."""
    text = checked.spec.text
    for metric, name, share in (
        (JCT, "mean", text.disaggregated_mean_jct),
        ("jct_p99_s", "P99", text.disaggregated_p99_jct),
    ):
        published, ours = _gains(checked.published, metric), _gains(checked.ours, metric)
        yield Claim(
            key=f"disaggregation {name}",
            says=f"disaggregation has up to {share:.0%} lower {name} JCT than data parallel",
            published=f"{share:.0%} (curves {_listed(published)})",
            ours=_listed(ours),
            reproduced=near(max(gain for gain, *_ in ours), share),
        )


def balanced_at_high_rates(checked: Checked) -> Claim:
    rates = [rate for rate in checked.ours.rates_rps if rate >= BALANCED_FROM_RPS]
    return Claim(
        key="balanced best",
        says=f"balanced 0.1 has the lowest mean JCT from about {BALANCED_FROM_RPS:g}/s on",
        published=_winners(checked.published, rates),
        ours=_winners(checked.ours, rates),
        reproduced=all(checked.ours.ranking(JCT, rate)[0] == "balanced" for rate in rates),
    )


def flat_tpot(checked: Checked) -> Claim:
    curve = checked.ours.values["disaggregated"]["tpot_mean_s"]
    within = all(FLAT_S[0] <= value < FLAT_S[1] for value in curve)
    return Claim(
        key="flat TPOT",
        says="disaggregated mean TPOT stays flat at 13 to 14 ms",
        published=_span_ms(checked.published, "disaggregated"),
        ours=_span_ms(checked.ours, "disaggregated"),
        reproduced=within and checked.ours.growth("tpot_mean_s", "disaggregated") <= FLAT,
    )


def growing_tpot(checked: Checked) -> Claim:
    """While that of disaggregation does not, whatever its level."""
    ours = checked.ours
    grows = ours.growth("tpot_mean_s", "data_parallel") >= GROWS
    return Claim(
        key="growing TPOT",
        says="data parallel's mean TPOT grows with the rate while disaggregated's does not",
        published=_growths(checked.published),
        ours=_growths(ours),
        reproduced=grows and ours.growth("tpot_mean_s", "disaggregated") <= FLAT,
    )


def exploding_ttft(checked: Checked) -> Claim:
    return Claim(
        key="exploding TTFT",
        says="disaggregated mean TTFT explodes near 5.6/s",
        published=_explosion(checked.published, "disaggregated"),
        ours=_explosion(checked.ours, "disaggregated"),
        reproduced=_explodes(checked.ours, "disaggregated") >= EXPLODES,
    )


def balanced_lessens(checked: Checked) -> Claim:
    last = checked.ours.rates_rps[-1]
    published, ours = (
        each.gain("ttft_mean_s", "balanced", "disaggregated", last) for each in (checked.published, checked.ours)
    )
    return Claim(
        key="balanced TTFT",
        says=f"balanced 0.1 lessens disaggregated's mean TTFT at {last:g}/s",
        published=f"{published:.0%} lower",
        ours=f"{ours:.0%} lower",
        reproduced=near(ours, published),
    )


def _order(curves: Curves, ranking: Sequence[str], rate: float) -> str:
    return " < ".join(f"{TITLES[pattern]} {curves.at(pattern, JCT, rate):.2f}" for pattern in ranking)


def _rate(rate_rps: float | None) -> str:
    return "never" if rate_rps is None else f"{rate_rps:.1f}/s"


def _gains(curves: Curves, metric: str) -> list[tuple[float, str, float]]:
    return [curves.best_gain(metric, [pattern], "data_parallel") for pattern in SPLIT_FORMS]


def _listed(gains: Sequence[tuple[float, str, float]]) -> str:
    return ", ".join(f"{TITLES[pattern]} {gain:.1%} at {rate:g}/s" for gain, pattern, rate in gains)


def _winners(curves: Curves, rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}/s: {TITLES[curves.ranking(JCT, rate)[0]]}" for rate in rates)


def _span_ms(curves: Curves, pattern: str) -> str:
    curve = curves.values[pattern]["tpot_mean_s"]
    return f"{1e3 * curve[0]:.1f} to {1e3 * curve[-1]:.1f} ms"


def _growths(curves: Curves) -> str:
    return ", ".join(
        f"{TITLES[each]} × {curves.growth('tpot_mean_s', each):.2f}" for each in ("data_parallel", "disaggregated")
    )


def _explodes(curves: Curves, pattern: str) -> float:
    return curves.at(pattern, "ttft_mean_s", curves.rates_rps[-1]) / curves.at(
        pattern, "ttft_mean_s", EXPLODES_FROM_RPS
    )


def _explosion(curves: Curves, pattern: str) -> str:
    last = curves.rates_rps[-1]
    return f"× {_explodes(curves, pattern):.1f} from {EXPLODES_FROM_RPS:g} to {last:g}/s"
