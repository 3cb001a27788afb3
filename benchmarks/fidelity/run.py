"""The same requests on two SGLang engines and in the reference simulator, one pattern after the other.

Each run is split in time. What engines reported in its first part is all that our latency models are fitted to; the
simulator then runs the whole of it, and what arrived in the second part is compared.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.adapt.live.load import Client
from benchmarks.fidelity.summary import Columns, Compared, report
from benchmarks.fidelity.telemetry import STAGES, Span, Stages, fitted_fleet, served_stages, told_passes
from benchmarks.machine import describe
from benchmarks.real_engines import Fleet, check_model, fleet
from benchmarks.report import Report
from benchmarks.short_requests import Lengths, Traffic, bounds_at_pace, pace_of
from engines.types import Role
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, Knobs
from tuner.slo import DEFAULT_CLASS, Slo, SloTable
from tuner.twin.forecast import good_requests
from tuner.twin.reference import simulate_reference
from tuner.twin.types import Ending, Timeline
from tuner.workload import Workload

TRAFFIC = Traffic(
    "mixed lengths",
    rate_rps=0.35,
    prompt=Lengths(median=100, sigma=0.6, least=24, most=600),
    output=Lengths(median=12, sigma=0.5, least=3, most=48),
)
SLOS = SloTable(classes={DEFAULT_CLASS: Slo(ttft_ms=2500, tpot_ms=300)})
"""At pace 1: about three times an idle engine's TTFT of the median request, and twice its TPOT."""
FIT_SHARE = 0.5
OWN_SESSIONS = 1_000_000
WARM_UP_S = 10.0
SPLIT = {"e0": Role.PREFILL, "e1": Role.DECODE}
WHOLE = {"chunked_prefill_tokens": 4096, "prefill_decode_interval": 0}
WAYS = {
    "data_parallel": (DATA_PARALLEL, {}, Knobs(**WHOLE)),
    "disaggregated": (DISAGGREGATED, SPLIT, Knobs(**WHOLE)),
    "balanced 0.2": (BALANCED, SPLIT, Knobs(offload_ratio=0.2, **WHOLE)),
}
QUICK_WAYS = ("data_parallel", "disaggregated")


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    model: Path
    ways: Sequence[str]
    span_s: float
    """Of each run."""
    seed: int


async def run_fidelity(options: FidelityOptions) -> Report:
    """Raises `NoEngines` and `DiedAtStart`."""
    check_model(options.model)
    machine = describe()
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        async with fleet(options.model, Path(folder)) as trimtab:
            pace = await pace_of(trimtab.engine_urls[0], trimtab.model)
            bench = Bench(trimtab, TRAFFIC.at_pace(pace), bounds_at_pace(SLOS, pace), options)
            compared = [
                await bench.compared(way) for way in track(options.ways, "patterns", console=Console(stderr=True))
            ]
    slo = bench.slos.classes[DEFAULT_CLASS]
    return report(compared, bench.traffic, slo, options.seed, {**machine, "pace": f"{pace:.2f}"})


@dataclass(frozen=True, slots=True)
class Bench:
    """The engines, and what is asked of them."""

    trimtab: Fleet
    traffic: Traffic
    slos: SloTable
    options: FidelityOptions

    async def compared(self, way: str) -> Compared:
        pattern, roles, knobs = WAYS[way]
        plan = await self.trimtab.plan(pattern, roles, knobs)
        number = 2 * self.options.ways.index(way)
        await self._serve(self._requests(WARM_UP_S, self.options.seed + 1, number))
        workload = self._requests(self.options.span_s, self.options.seed, number + 1)
        begun_s, fit_until_s = time.time(), FIT_SHARE * workload.span_s
        served = await self._serve(workload)
        span = Span(begun_s, begun_s + fit_until_s)
        simulated_fleet = await fitted_fleet(self.trimtab.store, self.trimtab.model, span)
        timeline = simulate_reference(workload, simulated_fleet, plan, self.slos)
        profile = simulated_fleet[0].profile
        tested = Span(span.end_s, begun_s + workload.span_s)
        return Compared(
            way=way,
            workload=workload,
            test_from_s=fit_until_s,
            served=served,
            simulated=self._columns(workload, timeline),
            served_stages=await served_stages(self.trimtab.store, self.trimtab.model, tested),
            simulated_stages=_stages(timeline.take(workload.arrived_s >= fit_until_s)),
            passes=await told_passes(self.trimtab.store, self.trimtab.model, tested, profile),
            profile=profile,
        )

    def _requests(self, span_s: float, seed: int, number: int) -> Workload:
        """With prompts that no engine has seen under another number: of those it would have the KV still."""
        workload = self.traffic.over(span_s, np.random.default_rng(seed))
        return replace(workload, session=workload.session + (1 + number) * OWN_SESSIONS)

    async def _serve(self, workload: Workload) -> Columns:
        async with aclosing(Client(self.trimtab.url, self.trimtab.model, workload)) as client:
            seen = await client.run()
        return Columns(seen.complete, seen.ttft_s, seen.tpot_s, seen.good(workload, self.slos))

    def _columns(self, workload: Workload, timeline: Timeline) -> Columns:
        good = good_requests(workload, timeline, self.slos)
        return Columns(timeline.ending == Ending.OK, timeline.ttft_s, timeline.tpot_s, good)


def _stages(timeline: Timeline) -> Stages:
    return {stage: float(np.nanmean(getattr(timeline, stage))) for stage in STAGES}
