"""Requests that a small model on one core can serve: lognormal lengths, arriving at random, sharing nothing.

CPUs differ by a factor of three in what they do with such a model. Rates and bounds are therefore written down for an
engine of a certain pace, and stretched in time for one that is slower.
"""

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from benchmarks.adapt.live.load import Client
from benchmarks.unshared import unshared
from tuner.slo import SloTable
from tuner.workload import Ints, Workload

PACE_STEP_S = 0.15
"""Between two tokens of a stream that has an engine of pace 1 to itself."""
PACE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: a lognormal distribution cut off at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        drawn = rng.lognormal(np.log(self.median), self.sigma, count)
        return np.clip(np.rint(drawn), self.least, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one kind, `rate_rps` a second by a Poisson process."""

    name: str
    rate_rps: float
    prompt: Lengths
    output: Lengths

    def at_pace(self, pace: float) -> Self:
        """The same for engines that take `pace` times as long."""
        return replace(self, rate_rps=self.rate_rps / pace)

    def over(self, span_s: float, rng: np.random.Generator) -> Workload:
        """So many seconds of it, in class `default`; a Poisson process given how many requests there are."""
        count = max(1, round(self.rate_rps * span_s))
        arrived_s = np.sort(rng.uniform(0, span_s, count))
        return unshared(span_s, arrived_s, self.prompt.draw(count, rng), self.output.draw(count, rng))


def bounds_at_pace(slos: SloTable, pace: float) -> SloTable:
    """What may be asked of engines that take `pace` times as long."""
    scaled = {
        name: slo.model_copy(update={"ttft_ms": slo.ttft_ms * pace, "tpot_ms": slo.tpot_ms * pace})
        for name, slo in slos.classes.items()
    }
    return slos.model_copy(update={"classes": scaled})


async def pace_of(url: str, model: str) -> float:
    """How many times as long as an engine of pace 1 the idle one at `url` takes for a token."""
    alone = Traffic("alone", 1.0, Lengths(32, 0.0, 32, 32), Lengths(24, 0.0, 24, 24))
    found = []
    for number in range(PACE_ROUNDS + 1):
        workload = alone.over(1.0, np.random.default_rng(number))
        async with aclosing(Client(url, model, workload)) as client:
            found.append(float((await client.run()).tpot_s[0]))
    # The first request of an engine's life pays for what it loads.
    return float(np.median(found[1:])) / PACE_STEP_S
