"""Two phases for which different patterns are best on two engines of one core each, and what clients are promised.

Chosen with the simulator before any policy was measured on engines. Of long prompts with a short answer, one engine can
prefill all that the other decodes, and decoding is not held up; of short prompts with a long answer, decoding is all
the work there is, and one engine cannot do it alone.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.short_requests import Lengths, Traffic
from tuner.slo import DEFAULT_CLASS, Slo, SloTable
from tuner.workload import Workload

READING = Traffic(
    "reading",
    rate_rps=0.7,
    prompt=Lengths(median=120, sigma=0.2, least=60, most=240),
    output=Lengths(median=8, sigma=0.2, least=4, most=16),
)
WRITING = Traffic(
    "writing",
    rate_rps=0.6,
    prompt=Lengths(median=16, sigma=0.2, least=8, most=32),
    output=Lengths(median=20, sigma=0.2, least=10, most=40),
)
PHASES = (READING, WRITING)
SLOS = SloTable(classes={DEFAULT_CLASS: Slo(ttft_ms=3500, tpot_ms=240)})


def phases(traffic: Sequence[Traffic], phase_s: float, seed: int) -> Sequence[Workload]:
    """Each by itself, from second 0."""
    streams = np.random.SeedSequence(seed).spawn(len(traffic))
    return [each.over(phase_s, np.random.default_rng(stream)) for each, stream in zip(traffic, streams, strict=True)]
