"""What a long prompt does to streams that are decoding: data parallel, disaggregated, and SGLang's own way of it.

Two engines, a core each. Four streams decode; a long prompt arrives; the worst pause of the four until that prompt has
its first token is the figure. Besides, one prompt on the idle stack: TTFT, second token, TPOT.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.real_engines import Fleet, check_model, fleet, name_of
from benchmarks.report import Report
from benchmarks.sglang_interference.native import native
from benchmarks.sglang_interference.streams import Client, Stream
from benchmarks.sglang_interference.summary import Idle, Sample, report
from benchmarks.sglang_router import missing
from benchmarks.words import Prompts
from engines.types import Role
from tuner.plan import Knobs

STREAMS = 4
STREAM_PROMPT_TOKENS = 60
STREAM_TOKENS = 600
SETTLED_TOKENS = 6
"""A stream counts as running, and its pace as known, after so many tokens."""
LONG_TOKENS = 1500
IDLE_TOKENS = 1000
IDLE_OUTPUT_TOKENS = 20
UNCHUNKED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class InterferenceOptions:
    model: Path
    stacks: Sequence[str]
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run two engines: a plan for our own router."""

    pattern: str
    roles: dict[str, Role]
    knobs: Knobs


SPLIT = {"e0": Role.PREFILL, "e1": Role.DECODE}
WHOLE = {"chunked_prefill_tokens": UNCHUNKED_TOKENS, "prefill_decode_interval": 0}
NO_BYPASS = {"min_remote_tokens": 256}
WAYS = {
    "data_parallel": Way("data_parallel", {}, Knobs(**WHOLE)),
    "data_parallel, chunk 256, interval 1": Way(
        "data_parallel", {}, Knobs(chunked_prefill_tokens=256, prefill_decode_interval=1)
    ),
    "disaggregated": Way("disaggregated", SPLIT, Knobs(**WHOLE, **NO_BYPASS)),
    "balanced 0.1": Way("balanced", SPLIT, Knobs(offload_ratio=0.1, **WHOLE, **NO_BYPASS)),
}
NATIVE = "SGLang's PD, sglang-router"
STACKS = (*WAYS, NATIVE)
QUICK_STACKS = ("data_parallel", "disaggregated")


async def run_interference(options: InterferenceOptions) -> Report:
    """Measure one stack after the other. Raises `NoEngines` and `DiedAtStart`."""
    check_model(options.model)
    machine, prompts = describe(), Prompts(options.model, options.seed)
    samples: list[Sample] = []
    idle: list[Idle] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="sglang-interference-") as folder:
        ours = [name for name in options.stacks if name in WAYS]
        if ours:
            async with _ours(options.model, Path(folder)) as (trimtab, client):
                for name in ours:
                    way = WAYS[name]
                    await trimtab.plan(way.pattern, way.roles, way.knobs)
                    await _measure(name, client, prompts, options.rounds, samples, idle)
        if NATIVE in options.stacks:
            reason = missing()
            if reason is not None:
                skipped[NATIVE] = reason
            else:
                async with native(options.model, Path(folder)) as url, Client.at(url, name_of(options.model)) as client:
                    await _measure(NATIVE, client, prompts, options.rounds, samples, idle)
    return report(samples, idle, options.stacks, options.seed, machine, skipped)


@asynccontextmanager
async def _ours(model: Path, folder: Path) -> AsyncIterator[tuple[Fleet, Client]]:
    async with AsyncExitStack() as held:
        trimtab = await held.enter_async_context(fleet(model, folder))
        client = await held.enter_async_context(Client.at(trimtab.url, trimtab.model))
        yield trimtab, client


async def _measure(
    name: str, client: Client, prompts: Prompts, rounds: int, samples: list[Sample], idle: list[Idle]
) -> None:
    await client.complete(prompts.new(LONG_TOKENS // 4), 4)
    for number in range(rounds):
        samples.append(await _one_arrival(name, client, prompts, number))
        idle.append(await _one_idle(name, client, prompts, number))


async def _one_arrival(name: str, client: Client, prompts: Prompts, number: int) -> Sample:
    async with asyncio.TaskGroup() as group:
        running = [client.stream(prompts.new(STREAM_PROMPT_TOKENS), STREAM_TOKENS) for _ in range(STREAMS)]
        tasks = [group.create_task(one.run()) for one in running]
        await asyncio.gather(*(one.until(SETTLED_TOKENS) for one in running))
        before = [one.seen for one in running]
        await asyncio.gather(*(one.until(seen + SETTLED_TOKENS) for one, seen in zip(running, before, strict=True)))
        arrival = client.stream(prompts.new(LONG_TOKENS), IDLE_OUTPUT_TOKENS)
        arriving = group.create_task(arrival.run())
        await arriving
        for task in tasks:
            task.cancel()
    return _sample(name, number, running, arrival)


def _sample(name: str, number: int, running: Sequence[Stream], arrival: Stream) -> Sample:
    first_s = arrival.token_at_s[0]
    quiet = [gap for one in running for gap in one.gaps_s(one.token_at_s[1], arrival.sent_at_s)]
    disturbed = [gap for one in running for gap in one.gaps_s(arrival.sent_at_s, first_s)]
    return Sample(
        stack=name,
        round=number,
        quiet_gaps_s=quiet,
        worst_gap_s=max(disturbed),
        ttft_s=first_s - arrival.sent_at_s,
    )


async def _one_idle(name: str, client: Client, prompts: Prompts, number: int) -> Idle:
    one = client.stream(prompts.new(IDLE_TOKENS), IDLE_OUTPUT_TOKENS)
    await one.run()
    at_s = one.token_at_s
    return Idle(
        stack=name,
        round=number,
        ttft_s=at_s[0] - one.sent_at_s,
        second_token_s=at_s[1] - one.sent_at_s,
        tpot_s=(at_s[-1] - at_s[0]) / (len(at_s) - 1),
    )
