"""Knobs and telemetry of a real engine."""

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
            return prefilled >= 149 and ("e1", sent["bytes"]) in [(one.engine_id, one.bytes) for one in transfers]

        await until(told, "the pass that computed the prompt, and its transfer", 60.0)


def _info(raw: bytes) -> object:
    document = msgspec.json.decode(raw)
    return document.get("info", document)


async def _records(redis: Redis, key: str, kind: type) -> list:
    entries = await redis.xrange(key)
    return [msgspec.json.decode(next(iter(fields.values())), type=kind) for _, fields in entries]
