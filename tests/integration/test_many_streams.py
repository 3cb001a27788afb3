"""Five hundred streams at once through one router process, while the plan changes every second."""

import asyncio
import json
import sys
import time

import pytest

from controller.store import Keys, open_store
from tests.support.fleet import MODEL, until
from tuner.plan import IssuedBy, Knobs, Plan

STREAMS, TOKENS, PROMPTS = 500, 100, 10
PLANS = [
    ("data_parallel", {}),
    ("balanced", {"offload_ratio": 0.1}),
    ("disaggregated", {}),
    ("data_parallel", {"policy": "prefix_affinity"}),
]


def request(number: int) -> bytes:
    prompt = f"{number % PROMPTS} " + "the quick brown fox " * 20
    body = json.dumps(
        {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
    ).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def stream(port: int, number: int) -> list[str]:
    """The pieces of text of one stream, read from the wire; it must end with [DONE]."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request(number))
        raw = await reader.readuntil(b"0\r\n\r\n")
    finally:
        writer.close()
    assert raw.startswith(b"HTTP/1.1 200"), raw[:500]
    assert b"data: [DONE]" in raw
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return [choice["text"] for event in events for choice in json.loads(event)["choices"] if choice["text"]]


@pytest.mark.timeout(300)
async def test_five_hundred_streams_survive_a_plan_change_every_second(start_engine, redis_url, tmp_path):
    engines = await asyncio.gather(*(start_engine(f"e{n}", redis_url=redis_url) for n in range(4)))
    ready = tmp_path / "router.json"
    args = ["--model", MODEL, "--port", "0", "--redis-url", redis_url, "--ready-file", str(ready)]
    router = await asyncio.create_subprocess_exec(sys.executable, "-m", "controller.cli", "router", *args)
    try:
        await until(ready.exists, "the router serves")
        port = int(json.loads(ready.read_text())["url"].rsplit(":", 1)[1])
        expected = [await until(lambda n=n: _try(port, n), "the first streams work") for n in range(PROMPTS)]
        assert {len(pieces) for pieces in expected} == {TOKENS}
        changing = asyncio.create_task(_change_plans(redis_url))
        got = await asyncio.gather(*(stream(port, number) for number in range(STREAMS)))
        changing.cancel()
    finally:
        router.terminate()
        await router.wait()
    assert [number for number, pieces in enumerate(got) if pieces != expected[number % PROMPTS]] == []
    store = open_store(redis_url)
    records = [json.loads(entry.value) for entry in await store.latest(Keys(MODEL).requests, STREAMS)]
    await store.aclose()
    assert len(records) == STREAMS
    assert {record["outcome"] for record in records} == {"ok"}
    assert {record.get("resumed", 0) for record in records} == {0}
    assert router.returncode == 0
    for engine in engines:
        load = await engine.load()
        assert (load.running, load.queued, load.kv_used_tokens, load.kv_reserved_tokens) == (0, 0, 0, 0)


async def _try(port: int, number: int) -> list[str] | None:
    try:
        return await stream(port, number)
    except AssertionError:
        return None  # the router has not met the engines yet


async def _change_plans(redis_url: str) -> None:
    store = open_store(redis_url)
    try:
        for version in range(1, 1000):
            pattern, knobs = PLANS[version % len(PLANS)]
            plan = Plan(
                version=version,
                issued_at_s=time.time(),
                issued_by=IssuedBy.OPERATOR,
                reason="test",
                pattern=pattern,
                knobs=Knobs(**knobs),
            )
            await store.compare_and_set(Keys(MODEL).plan, plan.model_dump_json().encode(), version - 1 or None)
            await asyncio.sleep(1)
    finally:
        await store.aclose()
