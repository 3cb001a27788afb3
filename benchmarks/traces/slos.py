"""Two SLO levels, by a rule that was set before anything was measured.

Bounds are multiples of what the trace's 90th percentile request takes on one idle engine: prompt and answer of the 90th
percentile of their lengths. The tight level is what Splitwise asks for 90 % of requests (3 × TTFT, 1.5 × TPOT); the
loose level is twice that. 90 % of requests are to meet both.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.adapt.statics import fixed_plan
from benchmarks.traces.catalog import Trace
from benchmarks.traces.statistics import Statistics
from benchmarks.unshared import unshared
from tuner.candidates import data_parallel, explicit_knobs
from tuner.slo import BOOTSTRAP_SLOS, DEFAULT_CLASS, Slo, SloTable
from tuner.twin.reference import simulate_reference
from tuner.twin.types import TwinEngine
from tuner.types import EngineState

ATTAINMENT = 0.9


class Slowdown(NamedTuple):
    """How many times what an idle engine takes."""

    ttft: float
    tpot: float


LEVELS: Mapping[str, Slowdown] = {"tight": Slowdown(3.0, 1.5), "loose": Slowdown(6.0, 3.0)}


def slos_of(trace: Trace, statistics: Statistics, level: str) -> SloTable:
    """Bounds in whole tens of milliseconds and tenths of one."""
    ttft_s, tpot_s = idle(trace, statistics.p90_prompt_tokens, statistics.p90_output_tokens)
    slowdown = LEVELS[level]
    ttft_ms, tpot_ms = round(1e3 * slowdown.ttft * ttft_s, -1), round(1e3 * slowdown.tpot * tpot_s, 1)
    return SloTable(version=1, classes={DEFAULT_CLASS: Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, attainment=ATTAINMENT)})


def idle(trace: Trace, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    """TTFT and TPOT, in seconds, of one request alone on one engine."""
    fleet = [TwinEngine("e0", trace.engine)]
    plan = fixed_plan(data_parallel(1, explicit_knobs([EngineState("e0", trace.engine.kind, trace.engine)])), fleet)
    one = np.ones(1, dtype=np.int64)
    alone = unshared(1.0, np.zeros(1), prompt_tokens * one, output_tokens * one)
    timeline = simulate_reference(alone, fleet, plan, BOOTSTRAP_SLOS)
    return float(timeline.ttft_s[0]), float(timeline.tpot_s[0])
