"""How fast KV moves between two SGLang engines, beside NIXL alone and a memory copy of the same bytes.

The sender has every prompt in its context cache before it is asked, so that `remote_send` is transfer and little else;
the receiver's cache is emptied before each call. Both engines are idle otherwise.
"""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.machine import describe
from benchmarks.real_engines import check_model, engines, name_of, sglang_python, two_cores
from benchmarks.report import Report
from benchmarks.sglang_transfer.summary import Raw, Sample, report
from controller.stack.embedded import embedded_redis
from engines.client import EngineClient, Prompt, VerbTimeouts
from engines.protocol import TIMINGS_HEADER
from engines.types import EngineInfo, EngineTimings

TOKENS = (256, 512, 1024, 2048, 4096)
QUICK_TOKENS = (256, 1024)
TTL_S = 120.0
PATIENT = VerbTimeouts(verb_s=120.0, transfer_s=300.0)
FIRST_ID, LAST_ID = 1000, 40_000


@dataclass(frozen=True, slots=True)
class TransferOptions:
    model: Path
    tokens: Sequence[int]
    rounds: int
    seed: int


async def run_transfer(options: TransferOptions) -> Report:
    """Start two engines, measure, stop them. Raises `NoEngines` and `DiedAtStart`."""
    check_model(options.model)
    machine = describe()
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="sglang-transfer-")))
        redis = await held.enter_async_context(embedded_redis())
        urls = await held.enter_async_context(engines(options.model, folder, redis.url))
        http = await held.enter_async_context(httpx.AsyncClient(timeout=300))
        sender, receiver = [await held.enter_async_context(aclosing(EngineClient(url, PATIENT))) for url in urls]
        pair = Pair(sender, receiver, http, name_of(options.model))
        samples = await _all_samples(pair, options)
        info = await receiver.info()
        raw = await _raw(info, options)
    return report(samples, raw, info, options.seed, machine)


@dataclass(frozen=True, slots=True)
class Pair:
    sender: EngineClient
    receiver: EngineClient
    http: httpx.AsyncClient
    model: str

    async def compute(self, ids: Sequence[int]) -> None:
        """Put a prompt into the sender's context cache."""
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        (await self.http.post(f"{self.sender.url}/v1/completions", json=body)).raise_for_status()

    async def forget(self) -> None:
        """Empty the receiver's context cache."""
        for _ in range(50):
            if (await self.http.post(f"{self.receiver.url}/flush_cache")).is_success:
                return
            await asyncio.sleep(0.1)

    async def sample(self, ids: Sequence[int], request_id: str) -> Sample:
        """One request in three calls, timed here."""
        prompt, end = Prompt.of(list(ids)), len(ids) - 1
        started_s = time.perf_counter()
        reserved = await self.receiver.prep_recv(request_id, prompt, end, TTL_S)
        reserved_s = time.perf_counter()
        begin = reserved.prefix_matched_length
        sent = await self.sender.remote_send(request_id, prompt, reserved.kv_addr_info, begin, end)
        sent_s = time.perf_counter()
        timings = await self._generate(ids, request_id, end)
        done_s = time.perf_counter()
        return Sample(
            tokens=end - begin,
            bytes=sent.bytes,
            transfer_s=sent.transfer_s,
            prefill_s=sent.prefill_s - sent.queue_s,
            prep_recv_s=reserved_s - started_s,
            remote_send_s=sent_s - reserved_s,
            start_generate_s=done_s - sent_s,
            generation_s=timings.prefill_s + timings.decode_s,
            cached_tokens=timings.cached_tokens,
        )

    async def _generate(self, ids: Sequence[int], request_id: str, end: int) -> EngineTimings:
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
        call = {"request_id": request_id, "api": "completions", "body": body, "prompt": list(ids), "begin": end}
        answer = await self.http.post(f"{self.receiver.url}/microserving/start_generate", json=call)
        answer.raise_for_status()
        return msgspec.json.decode(answer.headers[TIMINGS_HEADER], type=EngineTimings)


async def _all_samples(pair: Pair, options: TransferOptions) -> list[Sample]:
    rng = random.Random(options.seed)
    samples = []
    # The first transfer between two engines makes them acquainted.
    await _one(pair, rng, 64, "warm-up", 1)
    for tokens in options.tokens:
        samples += await _one(pair, rng, tokens, f"t{tokens}", options.rounds)
    return samples


async def _one(pair: Pair, rng: random.Random, tokens: int, name: str, rounds: int) -> list[Sample]:
    ids = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(tokens + 1)]
    await pair.compute(ids)
    samples = []
    for number in range(rounds):
        await pair.forget()
        samples.append(await pair.sample(ids, f"{name}-{number}"))
    return samples


async def _raw(info: EngineInfo, options: TransferOptions) -> Mapping[int, Raw]:
    """NIXL alone and a memory copy, in the Python that has NIXL, on the engines' cores."""
    layout = info.kv_layout
    per_layer = layout.bytes_per_token // (2 * layout.layers)
    numbers = [layout.layers, per_layer, max(options.tokens), options.rounds, *options.tokens]
    command = [str(sglang_python()), "-P", "-m", "benchmarks.sglang_transfer.raw", *map(str, numbers)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "UCX_NET_DEVICES": "lo"},
    )
    os.sched_setaffinity(process.pid, set(two_cores()))
    said, _ = await process.communicate()
    # NIXL greets on standard output; the figures are on the last line.
    found = json.loads(said.decode().strip().splitlines()[-1])
    return {int(tokens): msgspec.convert(times, Raw) for tokens, times in found.items()}
