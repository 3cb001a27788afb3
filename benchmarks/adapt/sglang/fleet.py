"""Two SGLang engines on the CPU that one policy after another uses, each as if they had just been started."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from redis.asyncio import Redis

from benchmarks.adapt.live.stack import LiveStack, controlled, note
from benchmarks.real_engines import ENGINES, NO_TOKEN, name_of
from benchmarks.sglang_router import sglang_router
from controller.stack.embedded import embedded_redis
from controller.stack.parts import Parts, StackOptions
from controller.stack.supervise import Supervisor
from engines.client import EngineClient, VerbTimeouts
from engines.protocol import Config
from tuner.slo import SloTable

FLUSH_S = 120.0
PATIENT = VerbTimeouts(verb_s=60.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """The engines, and the way to put them back to how they were when they started."""

    parts: Parts
    urls: Sequence[str]
    folder: Path
    clients: Sequence[EngineClient]
    http: httpx.AsyncClient
    knobs: Config

    @asynccontextmanager
    async def trimtab(self, slos: SloTable) -> AsyncIterator[LiveStack]:
        """Router and controller that know nothing yet."""
        await self._as_new()
        async with (
            Supervisor(self.folder, note(self.folder)) as children,
            controlled(children, self.parts, slos) as stack,
        ):
            yield stack

    @asynccontextmanager
    async def peer(self, policy: str) -> AsyncIterator[str]:
        """The peer router over the same engines; its address."""
        await self._as_new()
        arguments = ["--worker-urls", *self.urls, "--policy", policy]
        async with sglang_router(arguments, self.folder) as url:
            yield url

    async def _as_new(self) -> None:
        """Empty stores and caches, knobs as at the start."""
        async with Redis.from_url(self.parts.redis_url) as redis:
            await redis.flushall()
        for client in self.clients:
            await client.config(self.knobs)
            await self._forget(client.url)

    async def _forget(self, url: str) -> None:
        async with asyncio.timeout(FLUSH_S):
            while not (await self.http.post(f"{url}/flush_cache")).is_success:  # noqa: ASYNC110  it only answers
                await asyncio.sleep(0.2)


@asynccontextmanager
async def pair(model: Path, folder: Path) -> AsyncIterator[Pair]:
    """Two engines, a core each, and Redis. Raises `DiedAtStart` or `RedisDidNotStart`."""
    async with AsyncExitStack() as held:
        redis = await held.enter_async_context(embedded_redis())
        options = StackOptions(engines=ENGINES, profile="", port=0, admin_port=0, model_folder=model)
        parts = Parts(options, name_of(model), NO_TOKEN, redis.url)
        children = await held.enter_async_context(Supervisor(folder, note(folder)))
        started = await children.start(*parts.engines())
        urls = [child.url for child in started if child.url is not None]
        clients = [await held.enter_async_context(aclosing(EngineClient(url, PATIENT))) for url in urls]
        http = await held.enter_async_context(httpx.AsyncClient(timeout=FLUSH_S))
        load = await clients[0].load()
        knobs = Config(
            chunked_prefill_tokens=load.chunked_prefill_tokens, prefill_decode_interval=load.prefill_decode_interval
        )
        yield Pair(parts, urls, folder, clients, http, knobs)
