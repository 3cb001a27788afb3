"""What clients got against what was predicted for them, by region of plans.

The search multiplies predictions by these factors, so that what is finally maximised is what clients get. A region that
was never in force inherits the error common to all: else every untried plan would look better than what is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

PRIOR_WEIGHT = 4.0
"""Observations that the prior (for a region: the common error; for the common error: none at all) is worth."""

MEMORY = 20.0
"""Observations after which older ones have faded to about a third."""

FLOOR = 0.02
"""Attainment below this says only that the plan is bad; its logarithm must not run away."""

LARGEST = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Error:
    """A fading mean of log(measured / predicted)."""

    total: float = 0.0
    weight: float = 0.0

    def learn(self, value: float, weight: float) -> "Error":
        fade = math.exp(-weight / MEMORY)
        return Error(self.total * fade + value * weight, self.weight * fade + weight)

    def mean(self, prior: float) -> float:
        return (self.total + PRIOR_WEIGHT * prior) / (self.weight + PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Immutable; `learn` gives a new one."""

    common: Error = Error()
    regions: Mapping[str, Error] = field(default_factory=dict)

    def factor(self, region: str) -> float:
        """What to multiply a predicted attainment of this region by, within a factor of two."""
        common = self.common.mean(0.0)
        error = self.regions.get(region, Error()).mean(common)
        return math.exp(max(-LARGEST, min(LARGEST, error)))

    def learn(self, region: str, predicted: float, measured: float, weight: float = 1.0) -> Self:
        """Take in one interval: attainment as predicted, uncorrected, and as measured."""
        value = math.log(max(FLOOR, measured) / max(FLOOR, predicted))
        learnt = self.regions.get(region, Error()).learn(value, weight)
        return type(self)(self.common.learn(value, weight), {**self.regions, region: learnt})
