"""What keeps a router process going, and how it ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import RouterMetrics
from controller.router.app import RunningRouter, _Background, _close, _heartbeat
from controller.router.board import Board
from controller.router.http import ClientConnection, HttpServer, Request
from controller.router.patterns import load_patterns
from controller.settings import Limits, RouterSettings
from controller.store import Keys, MemoryStore, StoreUnavailable

LIVENESS_S = 20.0
ANSWER_BYTES = 64 * 1024 * 1024
"""More than fits into the sockets' buffers on both sides."""


async def until(holds: object) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


class Drainable:
    """The part of a service that draining needs."""

    inflight = 0
    draining = False

    async def drained(self) -> None:
        pass


def answer(_: Request, client: ClientConnection) -> None:
    client.respond(200, b"x" * ANSWER_BYTES)


@pytest.fixture
async def running() -> AsyncIterator[RunningRouter]:
    loop = asyncio.get_running_loop()
    http = HttpServer(answer, lambda *_: (b"", b""), Limits(), loop, time.monotonic, time.time)
    server = await loop.create_server(http.protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield RunningRouter(Drainable(), http, server, f"127.0.0.1:{port}")  # type: ignore[arg-type]
    await _close(server, http)


async def ask(running: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request whose answer is made at once, and read none of it yet."""
    reader, writer = await asyncio.open_connection(*running.url.split(":"))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: running.http.connections)
    await reader.readexactly(1)
    return reader, writer


async def test_draining_sends_a_slow_client_the_whole_of_its_answer(running: RunningRouter) -> None:
    reader, writer = await ask(running)
    draining = asyncio.create_task(running.drain(LIVENESS_S))
    await asyncio.sleep(0.1)
    assert not draining.done()
    received = len(await reader.read())
    await draining
    assert received > ANSWER_BYTES
    writer.close()


async def test_draining_does_not_wait_for_ever_for_a_client_that_takes_nothing(running: RunningRouter) -> None:
    _, writer = await ask(running)
    async with asyncio.timeout(LIVENESS_S):
        await running.drain(0.1)
    assert running.http.connections == 1
    writer.close()


async def test_work_that_is_kept_begins_anew_after_it_failed() -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise RuntimeError("unexpected")
        await asyncio.Event().wait()

    async with _Background(grace_s=0, pause_s=0.01) as tasks:
        tasks.keep(work)
        await until(lambda: begun == 3)


async def test_an_errand_that_failed_is_not_repeated() -> None:
    begun = 0

    async def errand() -> None:
        nonlocal begun
        begun += 1
        raise RuntimeError("unexpected")

    async with _Background(grace_s=0, pause_s=0.01) as tasks:
        tasks.start(errand())
        await asyncio.sleep(0.1)
    assert begun == 1


class FlakyStore(MemoryStore):
    away = True
    beats = 0

    async def heartbeat(self, key: str, value: bytes, ttl_s: float) -> None:
        self.beats += 1
        if self.away:
            raise StoreUnavailable("Redis refuses: MISCONF")


async def test_heartbeats_tell_whether_the_store_answers_though_no_record_is_written() -> None:
    registry = CollectorRegistry()
    metrics, store = RouterMetrics(registry), FlakyStore()
    settings = RouterSettings(model="m", engines=("http://127.0.0.1:1",), heartbeat_s=0.01)
    service = SimpleNamespace(inflight=0, draining=False)
    beating = asyncio.create_task(
        _heartbeat(
            settings,
            store,
            Keys("m"),
            Board(load_patterns(), metrics),
            metrics,
            SimpleNamespace(url="http://127.0.0.1:1", service=service),  # type: ignore[arg-type]
        )
    )
    store.away = False
    await until(lambda: registry.get_sample_value("trimtab_store_up") == 1)
    store.away = True
    await until(lambda: registry.get_sample_value("trimtab_store_up") == 0)
    assert not beating.done()
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
