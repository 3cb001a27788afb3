"""Two phases for which different patterns are best on two engines of one core each, and what clients are promised.

Chosen with the simulator, its engines as slow as the latency models of real ones had become. The bounds and the first
phase were set before this traffic was measured on engines. The load of the second was raised once after that, with
seed 1: data parallel and its like had served all of it, and there was nothing to compare.

Of prompts that a short answer follows, one engine can prefill all that the other decodes, and no answer is held up by a
prompt; of prompts of every length that one token answers, prefilling is all the work there is, and it is more than one
engine can do.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.short_requests import Lengths, Traffic
from tuner.slo import DEFAULT_CLASS, Slo, SloTable
from tuner.workload import Workload

ANSWERING = Traffic(
    "answering",
    rate_rps=0.7,
    prompt=Lengths(median=160, sigma=0.2, least=80, most=320),
    output=Lengths(median=8, sigma=0.2, least=4, most=16),
)
LABELLING = Traffic(
    "labelling",
    rate_rps=1.5,
    prompt=Lengths(median=140, sigma=0.8, least=32, most=600),
    output=Lengths(median=1, sigma=0.0, least=1, most=1),
)
PHASES = (ANSWERING, LABELLING)
SLOS = SloTable(classes={DEFAULT_CLASS: Slo(ttft_ms=6000, tpot_ms=320)})


def phases(traffic: Sequence[Traffic], phase_s: float, seed: int) -> Sequence[Workload]:
    """Each by itself, from second 0."""
    streams = np.random.SeedSequence(seed).spawn(len(traffic))
    return [each.over(phase_s, np.random.default_rng(stream)) for each, stream in zip(traffic, streams, strict=True)]
