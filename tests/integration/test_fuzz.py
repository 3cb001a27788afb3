"""Ten thousand requests nobody would send, and afterwards nothing is held and nothing was answered with a surprise."""

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.fleet import MODEL, Fleet, engine_processes, open_fleet

REQUESTS, BATCH = 10_000, 100
DELIBERATE_5XX: set[str] = set()
"""Codes a healthy fleet may answer with a 5xx: none."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
prompts = st.one_of(
    st.text(max_size=400),
    st.lists(st.integers(0, 1500), max_size=200),
    st.lists(st.text(max_size=30), max_size=3),
    st.sampled_from(["word " * 3000, "long " * 40_000, ""]),
    json_values,
)
messages = st.one_of(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool", "?"]), "content": st.text(max_size=200)}
        ),
        max_size=4,
    ),
    json_values,
)


def often(valid: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly what belongs there, sometimes anything at all."""
    return st.one_of(valid, valid, valid, valid, json_values)


fields = {
    "model": st.one_of(*[st.just(MODEL)] * 9, json_values),
    "prompt": prompts,
    "messages": messages,
}
options = {
    "max_tokens": often(st.integers(1, 6)),
    "max_completion_tokens": often(st.integers(1, 6)),
    "stream": often(st.booleans()),
    "n": often(st.integers(1, 3)),
    "stop": often(st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), max_size=4)),
    "logprobs": often(st.booleans() | st.integers(0, 5)),
    "top_logprobs": often(st.integers(0, 5)),
    "temperature": often(st.floats(0, 2)),
    "stream_options": often(st.fixed_dictionaries({"include_usage": st.booleans()})),
    "tools": json_values,
    "chat_template_kwargs": json_values,
    "echo": often(st.booleans()),
    "user": json_values,
}
documents = st.fixed_dictionaries(fields, optional=options).map(lambda document: json.dumps(document).encode())
bodies = st.one_of(*[documents] * 6, st.binary(max_size=60), json_values.map(lambda value: json.dumps(value).encode()))
requests = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["POST"] * 8 + ["GET", "PUT", "DELETE"]),
        "path": st.sampled_from(
            ["/v1/completions", "/v1/chat/completions"] * 8 + ["/v1/models", "/ready", "/nope?x=1"]
        ),
        "body": bodies,
        "slo_class": st.sampled_from(["default", "chat", "no such class", ""]),
        "leaves": st.integers(0, 9).map(lambda number: number == 0),
    }
)


async def send(http: httpx.AsyncClient, request: dict) -> tuple[int, str | None]:
    """Status and error code of one request; status 0 for a client that left."""
    headers = {"x-slo-class": request["slo_class"], "content-type": "application/json"}
    sending = http.request(request["method"], request["path"], content=request["body"], headers=headers)
    if request["leaves"]:
        try:
            async with asyncio.timeout(0.01):
                answer = await sending
        except TimeoutError:
            return 0, None
    else:
        answer = await sending
    if answer.status_code < 400:
        return answer.status_code, None
    error = answer.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    return answer.status_code, error["code"]


async def send_all(fleet: Fleet, batch: list[dict]) -> Counter[tuple[int, str | None]]:
    async with asyncio.timeout(60):
        return Counter(await asyncio.gather(*(send(fleet.http, request) for request in batch)))


@pytest.mark.timeout(400)
def test_ten_thousand_strange_requests_break_nothing_and_leak_nothing(redis_url, tmp_path):
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        fleet = runner.run(_start(stack, tmp_path, redis_url))
        seen: Counter[tuple[int, str | None]] = Counter()

        @settings(
            max_examples=REQUESTS // BATCH,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(requests, min_size=BATCH, max_size=BATCH))
        def fuzz(batch: list[dict]) -> None:
            seen.update(runner.run(send_all(fleet, batch)))

        try:
            fuzz()
            runner.run(fleet.settled())
        finally:
            runner.run(stack.aclose())
    surprising = {key: count for key, count in seen.items() if key[0] >= 500 and key[1] not in DELIBERATE_5XX}
    assert not surprising
    assert seen.total() >= REQUESTS
    assert seen[200, None] > REQUESTS / 20


async def _start(stack: AsyncExitStack, tmp_path, redis_url: str) -> Fleet:
    start = await stack.enter_async_context(engine_processes(tmp_path))
    engines = {name: await start(name, time_scale=0.1) for name in ("e0", "e1", "e2")}
    fleet = await stack.enter_async_context(open_fleet(engines, redis_url, {}))
    await fleet.plan("balanced", {"e0": "prefill"}, offload_ratio=0.2, admission="queue", max_running_per_engine=32)
    return fleet
