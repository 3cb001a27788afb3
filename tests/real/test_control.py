"""Knobs and telemetry of a real engine."""

import asyncio
from statistics import median

import msgspec
from redis.asyncio import Redis

from controller.store import Keys
from engines.records import PassRecord, TransferRecord
from engines.types import EngineInfo
from tests.support.fleet import until
from tests.support.sglang import MODEL


async def test_the_chunk_size_takes_effect_between_batches(receiver, prompts):
    async def passes(tokens: int) -> float:
        before = await counted(receiver, "trimtab_engine_passes_total")
        prompt = [prompts.randrange(1000, 40_000) for _ in range(tokens)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        assert (await receiver.generate(f"chunks-{tokens}", body)).status_code == 200
        return await counted(receiver, "trimtab_engine_passes_total") - before

    usual = (await receiver.load()).chunked_prefill_tokens
    await receiver.post("config", chunked_prefill_tokens=64)
    # An engine that works ahead may begin a step that nobody needs.
    assert 5 <= await passes(320) <= 7
    await receiver.post("config", chunked_prefill_tokens=usual)
    assert 1 <= await passes(321) <= 3


async def test_no_chunk_is_larger_than_what_the_engine_started_with(receiver):
    """SGLang has left as much memory free as passes of that size take."""
    usual = (await receiver.load()).chunked_prefill_tokens
    answer = await receiver.post("config", chunked_prefill_tokens=16 * usual)
    assert answer.json()["chunked_prefill_tokens"] == usual
    assert (await receiver.load()).chunked_prefill_tokens == usual


async def test_decode_passes_come_between_the_chunks_of_a_prompt_as_the_interval_says(receiver, prompts):
    usual = await receiver.load()
    await receiver.post("config", chunked_prefill_tokens=64, prefill_decode_interval=2)
    try:
        meanwhile = await tokens_while_prefilling(receiver, prompts, chunks=8)
    finally:
        await receiver.post(
            "config",
            chunked_prefill_tokens=usual.chunked_prefill_tokens,
            prefill_decode_interval=usual.prefill_decode_interval,
        )
    # Two passes between two chunks each time; chunks back to back would let one or two tokens through.
    assert meanwhile >= 10


async def tokens_while_prefilling(receiver, prompts, chunks: int) -> int:
    """How many tokens a running stream gets while a prompt of so many chunks of 64 is prefilled."""

    def ask(tokens: int, **more) -> dict[str, object]:
        prompt = [prompts.randrange(1000, 40_000) for _ in range(tokens)]
        return {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, **more}

    url, seen = f"{receiver.engine.url}/v1/completions", 0
    async with receiver.http.stream("POST", url, json=ask(20, max_tokens=120, stream=True)) as stream:
        events = (line async for line in stream.aiter_lines() if line.startswith("data: {"))
        for _ in range(4):
            await anext(events)
        prefilling = asyncio.create_task(receiver.http.post(url, json=ask(64 * chunks, max_tokens=1)))
        async for _ in events:
            if prefilling.done():
                break
            seen += 1
        assert (await prefilling).status_code == 200
    return seen


async def counted(receiver, name: str) -> float:
    text = (await receiver.http.get(f"{receiver.engine.url}/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def test_engines_tell_redis_what_they_are_and_do(sender, receiver, redis_url, prompts):
    keys = Keys(MODEL)
    async with Redis.from_url(redis_url) as redis:

        async def beats() -> list[EngineInfo]:
            found = [await redis.get(f"{keys.prefix}engine:{name}") for name in ("e0", "e1")]
            return [msgspec.json.decode(msgspec.json.encode(_info(raw)), type=EngineInfo) for raw in found if raw]

        async def both() -> bool:
            return len(await beats()) == 2

        await until(both, "both heartbeats", 60.0)
        assert {info.engine_id for info in await beats()} == {"e0", "e1"}
        prompt = [prompts.randrange(1000, 40_000) for _ in range(150)]
        reserved = await receiver.reserve("told", prompt)
        sent = (await sender.send("told", prompt, reserved, 149)).json()
        await receiver.post("abort", request_id="told")

        async def told() -> bool:
            passes = await _records(redis, keys.passes, PassRecord)
            transfers = await _records(redis, keys.transfers, TransferRecord)
            prefilled = sum(one.prefill_tokens for one in passes if one.engine_id == "e0")
            return prefilled >= 149 and ("e0", sent["bytes"]) in [(one.engine_id, one.bytes) for one in transfers]

        await until(told, "the pass that computed the prompt, and its transfer", 60.0)


async def test_a_pass_is_reported_with_its_own_duration_and_not_its_neighbours(receiver, redis_url, prompts):
    def ask(tokens: int, output: int) -> dict[str, object]:
        prompt = [prompts.randrange(1000, 40_000) for _ in range(tokens)]
        return {"model": MODEL, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}

    async with Redis.from_url(redis_url) as redis:

        async def long_passes() -> list[PassRecord]:
            found = await _records(redis, Keys(MODEL).passes, PassRecord)
            return [one for one in found if one.engine_id == "e1" and one.prefill_tokens >= 600]

        async def told() -> bool:
            return bool(await long_passes())

        # Among passes that only decode, which take a fraction of what the long prompt takes.
        async with asyncio.TaskGroup() as group:
            group.create_task(receiver.generate("short", ask(20, 40)))
            group.create_task(receiver.generate("long", ask(600, 2)))
        await until(told, "the pass that prefilled", 60.0)
        passes = await _records(redis, Keys(MODEL).passes, PassRecord)
        decodes = [one.wall_s for one in passes if one.engine_id == "e1" and not one.prefill_tokens]
        assert (await long_passes())[-1].wall_s > 3 * median(decodes)


def _info(raw: bytes) -> object:
    document = msgspec.json.decode(raw)
    return document.get("info", document)


async def _records(redis: Redis, key: str, kind: type) -> list:
    entries = await redis.xrange(key)
    return [msgspec.json.decode(next(iter(fields.values())), type=kind) for _, fields in entries]
