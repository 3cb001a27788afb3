"""SGLang engines on the CPU for benchmarks: two of them, each on a core, with or without a router before them."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from controller.admin.apply import wanted
from controller.heartbeats import Heartbeats
from controller.stack.embedded import embedded_redis
from controller.stack.parts import SGLANG_READY_S, SGLANG_STOP_S, Parts, StackOptions
from controller.stack.supervise import Child, ChildSpec
from controller.store import Keys, Store, open_store
from engines.client import EngineClient, VerbTimeouts
from engines.protocol import Config
from engines.sglang.launcher import CannotLaunch, find_python
from engines.types import Role
from tuner.plan import IssuedBy, Knobs, Plan

ENGINES = 2
PACKAGES = ("trimtab", "numpy", "httpx", "sglang-router")
NO_TOKEN = "benchmark"  # noqa: S105  nothing listens for it
APPLIED_S = 60.0
PATIENT = VerbTimeouts(verb_s=60.0)


class NoEngines(Exception):
    """A sentence that says what is missing."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two engines, `e0` and `e1`, and a router in front of them that follows `plan`."""

    url: str
    engine_urls: Sequence[str]
    model: str
    store: Store

    async def plan(self, pattern: str, roles: Mapping[str, Role], knobs: Knobs) -> Plan:
        """Put a plan in force: returns it once the router follows it, and the engines' knobs are turned as it says."""
        keys = Keys(self.model)
        found = await self.store.get(keys.plan)
        version = 1 if found is None else found.version + 1
        plan = Plan(
            version=version,
            issued_at_s=time.time(),
            issued_by=IssuedBy.OPERATOR,
            reason="benchmark",
            pattern=pattern,
            knobs=knobs,
            roles=roles,
        )
        await self.store.compare_and_set(keys.plan, plan.model_dump_json().encode(), version - 1 or None)
        async with asyncio.timeout(APPLIED_S):
            while not await self._applied(version):  # noqa: ASYNC110  the router tells Redis, not us
                await asyncio.sleep(0.1)
        # A controller would do it; there is none here.
        if (config := wanted(knobs)) is not None:
            await asyncio.gather(*(_configure(url, config) for url in self.engine_urls))
        return plan

    async def _applied(self, version: int) -> bool:
        routers = await Heartbeats(self.store, Keys(self.model)).routers()
        return bool(routers) and all(router.plan_version >= version for router in routers.values())


def check_model(folder: Path) -> None:
    """Raises `NoEngines` when there is no model or no SGLang."""
    if not (folder / "config.json").is_file():
        raise NoEngines(f"there is no model in {folder}: `make bench-sglang` prepares one")
    try:
        find_python()
    except CannotLaunch as error:
        raise NoEngines(str(error)) from error


def sglang_python() -> Path:
    """The Python that has SGLang."""
    return find_python()


async def _configure(url: str, config: Config) -> None:
    async with contextlib.aclosing(EngineClient(url, PATIENT)) as engine:
        await engine.config(config)


@contextlib.asynccontextmanager
async def engines(model: Path, folder: Path, redis_url: str) -> AsyncIterator[Sequence[str]]:
    """Two engines with the verbs; their addresses."""
    specs = _parts(model, redis_url).engines()
    async with running(specs, folder) as children:
        yield [_url(child) for child in children]


@contextlib.asynccontextmanager
async def fleet(model: Path, folder: Path) -> AsyncIterator[Fleet]:
    """Redis, two engines with the verbs, and a router."""
    async with contextlib.AsyncExitStack() as held:
        redis = await held.enter_async_context(embedded_redis())
        urls = await held.enter_async_context(engines(model, folder, redis.url))
        (router,) = await held.enter_async_context(running([_parts(model, redis.url).router()], folder))
        store = await held.enter_async_context(contextlib.aclosing(open_store(redis.url)))
        await until_ok(f"{_url(router)}/ready")
        yield Fleet(_url(router), urls, name_of(model), store)


@contextlib.asynccontextmanager
async def running(specs: Sequence[ChildSpec], folder: Path) -> AsyncIterator[Sequence[Child]]:
    """Children that are ready, until the block is left. Raises `DiedAtStart`."""
    children = [Child(spec, folder) for spec in specs]
    try:
        async with asyncio.TaskGroup() as starts:
            for child in children:
                starts.create_task(child.start())
        yield children
    finally:
        await asyncio.gather(*(child.stop() for child in children))


def peer_engine(model: Path, name: str, core: int, flags: Mapping[str, str | None], plugins: str) -> ChildSpec:
    """An engine without the verbs, with flags of its own; those that take no value have `None`."""
    given: dict[str, str | None] = {"model": str(model), "device": "cpu", "cores": str(core), "engine-id": name}
    given |= {"served-model-name": name_of(model), **flags}
    fixed = [part for flag, value in given.items() for part in (f"--{flag}", value) if part is not None]
    return ChildSpec(
        name,
        lambda port, ready: [
            *("-m", "controller.cli", "engine", "sglang", *fixed),
            *("--port", str(port), "--ready-file", str(ready)),
        ],
        env={"SGLANG_PLUGINS": plugins},
        stop_s=SGLANG_STOP_S,
        ready_s=SGLANG_READY_S,
    )


async def until_ok(url: str, within_s: float = 120.0) -> None:
    """Wait until an address answers with success."""
    async with asyncio.timeout(within_s), httpx.AsyncClient() as client:
        while not await _answers(client, url):  # noqa: ASYNC110  somebody else's process
            await asyncio.sleep(0.2)


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).is_success
    except httpx.TransportError:
        return False


def two_cores() -> tuple[int, int]:
    found = sorted(os.sched_getaffinity(0))
    return found[0], found[1 % len(found)]


def name_of(model: Path) -> str:
    return model.resolve().name


def _parts(model: Path, redis_url: str) -> Parts:
    options = StackOptions(engines=ENGINES, profile="", port=0, admin_port=0, model_folder=model)
    return Parts(options, name_of(model), NO_TOKEN, redis_url)


def _url(child: Child) -> str:
    if child.url is None:
        raise NoEngines(f"{child.spec.name} does not say where it listens")
    return child.url
