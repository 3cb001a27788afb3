"""Policy after policy on the same two SGLang engines, each from a cold start, on the same requests."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.live.load import Client, Seen
from benchmarks.adapt.live.stack import LiveStack
from benchmarks.adapt.sglang.fleet import Pair, pair
from benchmarks.adapt.sglang.summary import PEERS, Run, report
from benchmarks.adapt.sglang.traffic import PHASES, SLOS, phases
from benchmarks.machine import describe
from benchmarks.progress import progress
from benchmarks.real_engines import check_model
from benchmarks.report import Report
from benchmarks.sglang_router import missing
from benchmarks.short_requests import Traffic, bounds_at_pace, pace_of
from benchmarks.words import Prompts
from engines.types import Role
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, IssuedBy, Knobs, Plan
from tuner.slo import SloTable
from tuner.workload import Workload, concatenate

SPLIT = {"e0": Role.PREFILL, "e1": Role.DECODE}
OFFLOAD_RATIO = 0.2
STATICS = {
    DATA_PARALLEL: ({}, Knobs()),
    DISAGGREGATED: (SPLIT, Knobs()),
    BALANCED: (SPLIT, Knobs(offload_ratio=OFFLOAD_RATIO)),
}
POLICIES = (*STATICS, *PEERS, TRIMTAB)
QUICK_POLICIES = (DATA_PARALLEL, next(iter(PEERS)), TRIMTAB)
WARM_UP_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class SglangOptions:
    model: Path
    policies: Sequence[str]
    seeds: Sequence[int]
    phase_s: float


async def run_sglang(options: SglangOptions) -> Report:
    """Raises `NoEngines`, and what starting the processes raises."""
    check_model(options.model)
    machine, reason = describe(), missing()
    skipped = {} if reason is None else {policy: reason for policy in options.policies if policy in PEERS}
    policies = [policy for policy in options.policies if policy not in skipped]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="adapt-sglang-") as folder, progress() as bar:
        task = bar.add_task("starting engines", total=len(options.seeds) * len(policies))
        async with pair(options.model, Path(folder)) as engines:
            pace = await pace_of(engines.urls[0], engines.parts.model)
            traffic, slos = [each.at_pace(pace) for each in PHASES], bounds_at_pace(SLOS, pace)
            for seed in options.seeds:
                asked = Asked.of(options, traffic, slos, seed)
                for policy in policies:
                    bar.update(task, description=f"{policy}, seed {seed}")
                    runs.append(await _run(policy, seed, engines, asked))
                    bar.advance(task)
    return report(runs, traffic, slos, options.phase_s, options.seeds, {**machine, "pace": f"{pace:.2f}"}, skipped)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The requests of one seed: the same for every policy."""

    parts: Sequence[Workload]
    prompts: Sequence[str]
    slos: SloTable

    @classmethod
    def of(cls, options: SglangOptions, traffic: Sequence[Traffic], slos: SloTable, seed: int) -> Self:
        parts, prompts = phases(traffic, options.phase_s, seed), Prompts(options.model, seed)
        texts = [prompts.new(int(tokens)) for part in parts for tokens in part.prompt_tokens]
        return cls(parts, texts, slos)

    @property
    def workload(self) -> Workload:
        return concatenate(list(self.parts))


async def _run(policy: str, seed: int, engines: Pair, asked: Asked) -> Run:
    if policy in PEERS:
        async with engines.peer(PEERS[policy]) as url:
            return await _measured(policy, seed, url, engines, asked, None)
    async with engines.trimtab(asked.slos) as stack:
        if policy in STATICS:
            await stack.pin(_fixed(policy))
        else:
            await stack.tuned()
        return await _measured(policy, seed, stack.url, engines, asked, stack)


async def _measured(policy: str, seed: int, url: str, engines: Pair, asked: Asked, stack: LiveStack | None) -> Run:
    before = 0 if stack is None else len(await stack.plans())
    begun_s = time.time()
    seen = await _seen(url, engines.parts.model, asked)
    plans = [] if stack is None else [Plan.model_validate(each) for each in (await stack.plans())[before:]]
    return Run(policy, seed, asked.parts, seen.good(asked.workload, asked.slos), seen, begun_s, plans)


async def _seen(url: str, model: str, asked: Asked) -> Seen:
    async with aclosing(Client(url, model, asked.workload, asked.prompts)) as client:
        return await client.run()


def _fixed(pattern: str) -> Plan:
    roles, knobs = STATICS[pattern]
    return Plan(
        version=1,
        issued_at_s=0.0,
        issued_by=IssuedBy.OPERATOR,
        reason="a fixed plan of the benchmark",
        pattern=pattern,
        knobs=knobs,
        roles=roles,
    )
