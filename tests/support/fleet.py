"""A small real fleet: emulated engines as processes, a router on real sockets, a real Redis, faults on purpose."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from controller.router.app import RunningRouter, router
from controller.settings import RouterSettings, load
from controller.store import Keys, Store, StoreUnavailable, open_store
from engines.client import EngineClient
from engines.records import RequestRecord
from engines.types import EngineLoad
from tuner.plan import HotPrefix, IssuedBy, Knobs, Plan

MODEL = "trimtab-demo"
WORDS = "the quick brown fox jumps over the lazy dog and runs far away from every river it has ever seen "


CHARACTERS_PER_TOKEN = 2.53
"""Of the emulated engines' small vocabulary, on `WORDS`."""


def text_of(tokens: int, salt: str = "") -> str:
    """A prompt of about so many tokens; different salts share no prefix."""
    size = int(tokens * CHARACTERS_PER_TOKEN)
    return (salt + " " + WORDS * (size // len(WORDS) + 1))[:size]


async def until(condition: Callable[[], Any], what: str, within_s: float = 20.0) -> Any:
    """Poll a condition (sync or async) until it is true; what it returned."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"did not happen within {within_s} s: {what}")
        await asyncio.sleep(0.02)


class EngineProcess:
    """One emulated engine in a process of its own."""

    def __init__(self, engine_id: str, process: asyncio.subprocess.Process, url: str) -> None:
        self.engine_id = engine_id
        self.process = process
        self.url = url

    async def load(self) -> EngineLoad:
        client = EngineClient(self.url)
        try:
            return await client.load()
        finally:
            await client.aclose()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


StartEngine = Callable[..., Awaitable[EngineProcess]]


@asynccontextmanager
async def engine_processes(directory: Path) -> AsyncIterator[StartEngine]:
    """A way to start engines; whatever was started is gone afterwards."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(engine_id: str, **flags: object) -> EngineProcess:
        ready = directory / f"{engine_id}-{len(processes)}.json"
        given = {"profile": "laptop", "engine_id": engine_id, "ready_file": ready} | flags
        args = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        log = (directory / f"{engine_id}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engines.emulated", *args, stdout=log, stderr=log
        )
        log.close()
        processes.append(process)
        await until(lambda: ready.exists() or process.returncode is not None, f"engine {engine_id} serves", 30)
        if process.returncode is not None:
            raise AssertionError((directory / f"{engine_id}.log").read_text())
        return EngineProcess(engine_id, process, json.loads(ready.read_text())["url"])

    try:
        yield start
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


@dataclass
class Fleet:
    """A router in this process and its engines. `records` and `plan` go through the real store."""

    running: RunningRouter
    engines: dict[str, EngineProcess]
    store: Store
    keys: Keys
    http: httpx.AsyncClient
    _versions: int = 0
    _plans: list[Plan] = field(default_factory=list)

    @property
    def desk(self):
        return self.running.service._desk

    async def plan(
        self,
        pattern: str,
        roles: dict[str, str] | None = None,
        within_s: float = 20.0,
        replicas: tuple[HotPrefix, ...] = (),
        **knobs: object,
    ) -> Plan:
        """Publish a plan through the store and wait until the router has applied it."""
        self._versions += 1
        plan = Plan(
            version=self._versions,
            issued_at_s=time.time(),
            issued_by=IssuedBy.OPERATOR,
            reason="test",
            pattern=pattern,
            knobs=Knobs(**knobs),
            roles=roles or {},
            replicas=replicas,
        )
        await self.store.compare_and_set(self.keys.plan, plan.model_dump_json().encode(), self._versions - 1 or None)
        applied = self.running.service._board
        await until(lambda: applied.plan.version == plan.version, f"plan {plan.version} applied", within_s)
        return plan

    async def records(self, count: int) -> list[RequestRecord]:
        """The last `count` records, once that many are there."""

        async def enough() -> list[RequestRecord] | None:
            try:
                entries = await self.store.latest(self.keys.requests, count)
            except StoreUnavailable:  # the machine is busy: asked again
                return None
            found = [msgspec.json.decode(entry.value, type=RequestRecord) for entry in entries]
            return found if len(found) == count else None

        return await until(enough, f"{count} records")

    async def settled(self) -> None:
        """Nothing is held any more: no lease in the router, nothing running or reserved on any live engine."""
        await until(lambda: not self.running.service.inflight, "no request in flight")
        for engine in self.desk.fleet:
            assert (engine.own_inflight, engine.own_pending_tokens, engine.own_transfers) == (0, 0, 0)
        assert len(self.desk.room) == 0
        for process in self.engines.values():
            if process.process.returncode is None:
                await until(lambda p=process: self._empty(p), f"{process.engine_id} holds nothing")

    async def _empty(self, process: EngineProcess) -> bool:
        load = await process.load()
        return not (load.running or load.queued or load.kv_used_tokens or load.kv_reserved_tokens)


StartFleet = Callable[..., Awaitable[Fleet]]


@asynccontextmanager
async def open_fleet(
    engines: dict[str, EngineProcess], redis_url: str, given: dict[str, object]
) -> AsyncIterator[Fleet]:
    given = {
        "model": MODEL,
        "port": 0,
        "engines": [engine.url for engine in engines.values()],
        "load_poll_s": 0.05,
        "heartbeat_s": 0.2,
        "redis_url": redis_url,
    } | given
    settings = load(RouterSettings, **given)
    store = open_store(redis_url)
    async with (
        contextlib.aclosing(store),
        router(settings) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60) as http,
    ):
        fleet = Fleet(running, engines, store, Keys(settings.model), http)
        await until(lambda: fleet.desk.fleet.available == len(engines), "all engines are there")
        yield fleet


class Meddler:
    """A TCP proxy between a KV sender and its receiver that breaks what it is told to break."""

    def __init__(self) -> None:
        self.corrupt = 0
        self.cut = 0
        self.stall = 0
        self.connections = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        self.connections += 1
        fault = next((name for name in ("corrupt", "cut", "stall") if getattr(self, name) > 0), None)
        if fault:
            setattr(self, fault, getattr(self, fault) - 1)
        onward_reader, onward_writer = await asyncio.open_connection(host, port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, onward_writer, fault))
                group.create_task(self._pump(onward_reader, writer, None))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass  # one side hung up: exactly what this proxy is for
        finally:
            onward_writer.close()
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str | None) -> None:
        seen = 0
        while data := await reader.read(65536):
            seen += len(data)
            if fault == "stall":
                await asyncio.sleep(3600)
            if fault == "cut" and seen > 2000:
                raise ConnectionResetError
            if fault == "corrupt" and seen > 1500:
                data = data[:-1] + bytes([data[-1] ^ 0xFF])
            writer.write(data)
            await writer.drain()
        writer.write_eof()
