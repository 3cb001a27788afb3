"""Curves over rates: what one says of patterns, the same for published and simulated ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curves:
    """Values by pattern and metric, one for each of `rates_rps`, which increase."""

    rates_rps: Sequence[float]
    values: Mapping[str, Mapping[str, Sequence[float]]]

    def at(self, pattern: str, metric: str, rate_rps: float) -> float:
        """`ValueError` for a rate that was not run."""
        return self.values[pattern][metric][list(self.rates_rps).index(rate_rps)]

    def only(self, rates_rps: Sequence[float]) -> "Curves":
        """The same at some of the rates. `ValueError` for one that is not there."""
        rows = [list(self.rates_rps).index(rate) for rate in rates_rps]
        values = {
            pattern: {metric: [curve[row] for row in rows] for metric, curve in metrics.items()}
            for pattern, metrics in self.values.items()
        }
        return Curves(rates_rps, values)

    def ranking(self, metric: str, rate_rps: float) -> list[str]:
        """Patterns, the lowest value first."""
        return sorted(self.values, key=lambda pattern: self.at(pattern, metric, rate_rps))

    def gain(self, metric: str, pattern: str, over: str, rate_rps: float) -> float:
        """By which share a pattern's value is lower than another's; negative if it is higher."""
        return 1 - self.at(pattern, metric, rate_rps) / self.at(over, metric, rate_rps)

    def best_gain(self, metric: str, patterns: Sequence[str], over: str) -> tuple[float, str, float]:
        """The largest gain of any of the patterns at any rate: the gain, whose it is, and at which rate."""
        found = [(self.gain(metric, each, over, rate), each, rate) for each in patterns for rate in self.rates_rps]
        return max(found)

    def growth(self, metric: str, pattern: str) -> float:
        """Value at the highest rate relative to that at the lowest."""
        curve = self.values[pattern][metric]
        return curve[-1] / curve[0]

    def crossing_rps(self, metric: str, before: str, after: str) -> float | None:
        """The rate from which on `after` is below `before`, on straight lines between the rates.

        `None` if it is so at every rate or at none: the last crossing counts where there are several.
        """
        pair = zip(self.values[before][metric], self.values[after][metric], strict=True)
        gaps = [own - other for own, other in pair]
        found = None
        for (low, here), (high, there) in pairwise(zip(self.rates_rps, gaps, strict=True)):
            if here <= 0 < there:
                found = low + (high - low) * here / (here - there)
        return found
