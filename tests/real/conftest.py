"""Real engines behind a real router. Everything here is marked `real`."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.client import EngineClient
from engines.types import EngineInfo, EngineLoad
from tests.support.fleet import Fleet, open_fleet, until
from tests.support.otlp import Collector
from tests.support.sglang import MODEL, Pair, RealEngine, model_folder

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture
def pair(sglang_pair: Pair) -> Pair:
    """Both engines serve as at their start, whatever the test before did to them."""
    sglang_pair.mend()
    return sglang_pair


@dataclass
class Verbs:
    """The verbs of one engine, by name."""

    engine: RealEngine
    http: httpx.AsyncClient

    async def post(self, verb: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"{self.engine.url}/microserving/{verb}", json=body)

    async def tokens(self, text: str) -> list[int]:
        answer = await self.http.post(f"{self.engine.url}/tokenize", json={"prompt": text})
        found: list[int] = answer.json()["tokens"]
        return found

    async def reserve(self, request_id: str, prompt: list[int], end: int = -1, ttl_s: float = 60.0) -> dict[str, Any]:
        answer = await self.post("prep_recv", request_id=request_id, prompt=prompt, end=end, ttl_s=ttl_s)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def send(self, request_id: str, prompt: list[int], reserved: dict[str, Any], end: int) -> httpx.Response:
        begin = reserved["prefix_matched_length"]
        call = {"request_id": request_id, "prompt": prompt, "kv_addr_info": reserved["kv_addr_info"]}
        return await self.post("remote_send", **call, begin=begin, end=end)

    async def generate(self, request_id: str, body: dict[str, Any], **call: Any) -> httpx.Response:
        api = "chat" if "messages" in body else "completions"
        return await self.post("start_generate", request_id=request_id, api=api, body=body, **call)

    async def load(self) -> EngineLoad:
        client = EngineClient(self.engine.url)
        try:
            return await client.load()
        finally:
            await client.aclose()

    async def info(self) -> EngineInfo:
        client = EngineClient(self.engine.url)
        try:
            return await client.info()
        finally:
            await client.aclose()

    async def holds_nothing(self) -> bool:
        load = await self.load()
        return not (load.running or load.queued or load.kv_used_tokens or load.kv_reserved_tokens)

    async def whole(self) -> None:
        """Nothing is held, and once its cache is emptied every slot is free: none has been lost.

        An idle engine also checks that itself, and ends if a slot is missing.
        """
        await until(self.holds_nothing, f"{self.engine.engine_id} holds nothing", 120.0)
        await until(self._flushed, f"{self.engine.engine_id} can be flushed", 60.0)
        loads = (await self.http.get(f"{self.engine.url}/v1/loads")).json()["loads"]
        assert sum(load["num_used_tokens"] for load in loads) == 0
        assert self.engine.is_alive

    async def _flushed(self) -> bool:
        return (await self.http.post(f"{self.engine.url}/flush_cache")).status_code == 200


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        yield client


@pytest.fixture
def sender(pair: Pair, http: httpx.AsyncClient) -> Verbs:
    return Verbs(pair.engines[0], http)


@pytest.fixture
def receiver(pair: Pair, http: httpx.AsyncClient) -> Verbs:
    return Verbs(pair.engines[1], http)


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> random.Random:
    """For prompts that no other test has sent: `[prompts.randrange(1000, 40000) for _ in range(n)]`."""
    return random.Random(request.node.nodeid)


class RouterFacing:
    """What `tests.support.fleet.Fleet` asks of an engine."""

    def __init__(self, verbs: Verbs) -> None:
        self.engine_id = verbs.engine.engine_id
        self.url = verbs.engine.url
        self.process = self
        self._verbs = verbs

    @property
    def returncode(self) -> int | None:
        return None if self._verbs.engine.is_alive else -9

    async def load(self) -> EngineLoad:
        return await self._verbs.load()


@pytest.fixture
async def fleet(sender: Verbs, receiver: Verbs, redis_url: str, collector: Collector) -> AsyncIterator[Fleet]:
    """A router in front of both engines: `r0` before `e0` and `e1`. It traces what its clients trace."""
    engines: Any = {verbs.engine.engine_id: RouterFacing(verbs) for verbs in (sender, receiver)}
    # What one test left in the caches must not decide where the next one's requests go.
    await asyncio.gather(sender.whole(), receiver.whole())
    given = {"model": MODEL, "tokenizer": model_folder(), "load_poll_s": 0.5, "heartbeat_s": 1.0}
    given |= {"router_id": "r0", "traces_url": collector.url, "traces_ratio": 0.0, "log_requests": "lines"}
    async with open_fleet(engines, redis_url, given) as fleet:
        fleet.http.timeout = httpx.Timeout(300)
        yield fleet
