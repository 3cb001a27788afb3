"""Ten thousand requests nobody would send, and afterwards nothing is held and nothing was answered with a surprise."""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import engines.emulated
from tests.support.fleet import MODEL, Fleet, engine_processes, open_fleet

PARTS, REQUESTS, BATCH = 4, 2_500, 100
"""Parts, so that they can run side by side, and requests of each."""
TOKENIZER = Path(engines.emulated.__file__).parent / "tokenizer"
DELIBERATE_5XX: set[str] = set()
"""Codes a healthy fleet may answer with a 5xx: none."""

DEEP = b"[" * 20_000
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=3,
)
prompts = st.one_of(
    st.text(max_size=30),
    st.builds(lambda word, times: word * times, st.text(max_size=8), st.sampled_from([1, 10, 100, 600])),
    st.lists(st.integers(0, 1500), max_size=10).map(lambda ids: ids * 9),
    st.lists(st.text(max_size=10), max_size=3),
    st.sampled_from(["word " * 3000, "long " * 40_000, ""]),
    json_values,
)
messages = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool", "?"]), "content": st.text(max_size=20)}
        ),
        max_size=4,
    ),
    json_values,
)


some_text = st.builds(lambda word, times: word * times, st.text(max_size=8), st.sampled_from([1, 10, 100]))
good_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": some_text}),
    min_size=1,
    max_size=3,
)
options = {
    "stream": st.booleans(),
    "n": st.integers(1, 3),
    "stop": st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": st.integers(0, 5),
    "temperature": st.floats(0, 2),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "tools": json_values,
    "chat_template_kwargs": json_values,
    "echo": st.booleans(),
    "user": st.text(max_size=5),
}
likely = st.fixed_dictionaries(
    {
        "model": st.just(MODEL),
        "prompt": some_text | st.lists(st.integers(0, 1500), min_size=1, max_size=10).map(lambda ids: ids * 9),
        "messages": good_messages,
        "max_tokens": st.integers(1, 6),
    },
    optional={name: options[name] for name in ("stream", "stop", "temperature", "stream_options", "user")},
)
unlikely = st.fixed_dictionaries({"model": st.just(MODEL), "prompt": prompts, "messages": messages}, optional=options)
spoilt = st.builds(
    lambda document, key, value: document | {key: value},
    likely,
    st.sampled_from(["model", "prompt", "messages", "max_tokens", "max_completion_tokens", *options]),
    json_values,
)
documents = st.one_of(likely, likely, likely, unlikely, spoilt).map(lambda document: json.dumps(document).encode())
bodies = st.one_of(
    *[documents] * 8, st.binary(max_size=60), st.just(DEEP), json_values.map(lambda value: json.dumps(value).encode())
)
requests = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["POST"] * 20 + ["GET", "PUT", "DELETE"]),
        "path": st.sampled_from(
            ["/v1/completions", "/v1/chat/completions"] * 8 + ["/v1/models", "/ready", "/nope?x=1"]
        ),
        "body": bodies,
        "slo_class": st.sampled_from(["default", "chat", "no such class", ""]),
        "leaves": st.sampled_from([False] * 9 + [True]),
    }
)


async def send(http: httpx.AsyncClient, request: dict) -> tuple[int, str | None]:
    """Status and error code of one request; status 0 for a client that left."""
    headers = {"x-slo-class": request["slo_class"], "content-type": "application/json"}
    if request["leaves"]:
        await send_and_leave(http.base_url.port, request)
        return 0, None
    answer = await http.request(request["method"], request["path"], content=request["body"], headers=headers)
    if answer.status_code < 400:
        return answer.status_code, None
    error = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    return answer.status_code, error["code"]


async def send_and_leave(port: int, request: dict) -> None:
    head = (
        f"{request['method']} {request['path']} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(request['body'])}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + request["body"])
    await asyncio.sleep(len(request["body"]) % 10 / 500)
    writer.close()
    await writer.wait_closed()


async def send_all(fleet: Fleet, batch: list[dict]) -> Counter[tuple[int, str | None]]:
    async with asyncio.timeout(60):
        return Counter(await asyncio.gather(*(send(fleet.http, request) for request in batch)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_strange_requests_break_nothing_and_leak_nothing(part, redis_url, tmp_path):
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        fleet = runner.run(_start(stack, tmp_path, redis_url))
        seen: Counter[tuple[int, str | None]] = Counter()
        batch: list[dict] = []

        @seed(part)
        @settings(
            max_examples=REQUESTS,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(requests)
        def fuzz(request: dict) -> None:
            batch.append(request)
            if len(batch) == BATCH:
                seen.update(runner.run(send_all(fleet, batch)))
                batch.clear()

        try:
            fuzz()
            seen.update(runner.run(send_all(fleet, batch)))
            runner.run(fleet.settled())
        finally:
            runner.run(stack.aclose())
    surprising = {key: count for key, count in seen.items() if key[0] >= 500 and key[1] not in DELIBERATE_5XX}
    assert not surprising
    assert seen.total() >= REQUESTS
    assert seen[200, None] > REQUESTS / 5, seen


async def _start(stack: AsyncExitStack, tmp_path, redis_url: str) -> Fleet:
    start = await stack.enter_async_context(engine_processes(tmp_path))
    started = {name: await start(name, time_scale=0.1) for name in ("e0", "e1", "e2")}
    fleet = await stack.enter_async_context(open_fleet(started, redis_url, {"tokenizer": TOKENIZER}))
    await fleet.plan("balanced", {"e0": "prefill"}, offload_ratio=0.2, admission="queue", max_running_per_engine=32)
    return fleet
