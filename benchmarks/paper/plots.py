"""The same findings as pictures: ours beside published. Drawn off screen, small enough to be committed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paper.curves import Curves
from benchmarks.paper.goodput import Goodput
from benchmarks.paper.goodput_claims import gain
from benchmarks.paper.published import PATTERNS, TITLES, DistServe, Microserving

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"data_parallel": "#0072b2", "disaggregated": "#d55e00", "balanced": "#009e73", "tp8": "#7f7f7f"}
"""Told apart by all, colour-blind people included."""
BARS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
KINDS = {
    "baseline": "over vLLM of then",
    "same_kernels": "over the same kernels",
    "chunked": "over the same, chunked",
}
DOTS_PER_INCH = 90


def draw(
    folder: Path,
    microserving: Microserving,
    curves: Mapping[str, Curves],
    distserve: DistServe,
    goodput: Sequence[Goodput],
) -> list[Path]:
    """PNG files in the folder, which is made if need be. Raises `ImportError` without matplotlib."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    served = {"served": curves["served"]}
    drawn = {
        "microserving-jct.png": _curves(Figure, microserving, curves, {"jct_mean_s": "mean JCT, s"}, 4.8),
        "microserving-ttft-tpot.png": _curves(
            Figure, microserving, served, {"ttft_mean_s": "mean TTFT, s", "tpot_mean_s": "mean TPOT, s"}, None
        ),
        "distserve-goodput.png": _bars(Figure, distserve, goodput),
    }
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=DOTS_PER_INCH)
    return [folder / name for name in drawn]


def _curves(
    figure_type: "type[Figure]",
    spec: Microserving,
    curves: Mapping[str, Curves],
    metrics: Mapping[str, str],
    top: float | None,
) -> "Figure":
    """One panel for each hardware and metric: ours solid, published dashed."""
    figure = figure_type(figsize=(10, 4), layout="constrained")
    panels = [(hardware, metric) for hardware in curves for metric in metrics]
    for place, (hardware, metric) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        _panel(axes, curves[hardware], Curves(spec.rates_rps, spec.published), metric)
        axes.set_title(spec.hardware[hardware].title)
        axes.set_ylabel(metrics[metric])
        axes.set_ylim(0, top)
        if place == 1:
            axes.legend(fontsize=8)
    return figure


def _panel(axes: "Axes", ours: Curves, published: Curves, metric: str) -> None:
    for pattern in PATTERNS:
        colour = COLOURS[pattern]
        axes.plot(ours.rates_rps, ours.values[pattern][metric], color=colour, marker="o", label=TITLES[pattern])
        axes.plot(
            published.rates_rps, published.values[pattern][metric], color=colour, linestyle="--", linewidth=1, alpha=0.7
        )
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label="as published")
    axes.set_xlabel("requests/s")
    axes.grid(alpha=0.3)


def _bars(figure_type: "type[Figure]", spec: DistServe, goodput: Sequence[Goodput]) -> "Figure":
    """The gain of disaggregation over each baseline, beside the published gain over the first of them."""
    figure = figure_type(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot(1, 1, 1)
    groups = {"published, over vLLM": [each.published.rate_gain for each in spec.comparisons]}
    for kind, title in KINDS.items():
        groups[title] = [_gain(each.name, kind, goodput) for each in spec.comparisons]
    width = 0.8 / len(groups)
    for number, (title, heights) in enumerate(groups.items()):
        places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(heights))]
        axes.bar_label(axes.bar(places, heights, width, label=title, color=BARS[number]), fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(spec.comparisons)), [each.name for each in spec.comparisons])
    axes.set_ylabel("goodput per GPU, disaggregated / collocated")
    axes.legend(fontsize=8)
    return figure


def _gain(comparison: str, kind: str, goodput: Sequence[Goodput]) -> float:
    """0, which shows as no bar, where the baseline keeps its bounds at no rate."""
    own = {each.kind: each for each in goodput if each.comparison == comparison}
    return gain(own["disaggregated"], own[kind]) or 0.0
