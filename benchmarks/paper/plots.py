"""The same findings as pictures: ours beside published. Drawn off screen, small enough to be committed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.paper.curves import Curves
from benchmarks.paper.goodput import Goodput
from benchmarks.paper.published import PATTERNS, TITLES, DistServe, Microserving, published_rps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"data_parallel": "#0072b2", "disaggregated": "#d55e00", "balanced": "#009e73", "tp8": "#7f7f7f"}
"""Told apart by all, colour-blind people included."""
KINDS = {
    "disaggregated": ("disaggregated", "#d55e00"),
    "baseline": ("vLLM of then", "#0072b2"),
    "same_kernels": ("same kernels, collocated", "#56b4e9"),
    "chunked": ("same kernels, collocated, chunked", "#009e73"),
}
"""Systems of DistServe's comparison, with their names and colours."""
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
    """Goodput of each system; the published value of the two that have one is a line across its bar."""
    figure = figure_type(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot(1, 1, 1)
    width = 0.8 / len(KINDS)
    for number, (kind, (title, colour)) in enumerate(KINDS.items()):
        places = [place + (number - (len(KINDS) - 1) / 2) * width for place in range(len(spec.comparisons))]
        heights = [_goodput_rps(each.name, kind, goodput) for each in spec.comparisons]
        axes.bar_label(axes.bar(places, heights, width, label=title, color=colour), fmt="%.2f", fontsize=8)
        published = [published_rps(each, kind) for each in spec.comparisons]
        for place, height in zip(places, published, strict=True):
            if height is not None:
                axes.hlines(height, place - width / 2, place + width / 2, color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="as published")
    axes.set_xticks(range(len(spec.comparisons)), [each.name for each in spec.comparisons])
    axes.set_ylabel("goodput, requests/s and GPU")
    axes.legend(fontsize=8)
    return figure


def _goodput_rps(comparison: str, kind: str, goodput: Sequence[Goodput]) -> float:
    return next(each.goodput_rps for each in goodput if (each.comparison, each.kind) == (comparison, kind))
