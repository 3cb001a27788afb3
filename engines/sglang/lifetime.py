"""What runs beside SGLang's server in its HTTP process, from its start to its end. No SGLang in here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import structlog
from fastapi import FastAPI
from prometheus_client.registry import Collector

from engines.metrics import EngineCollector, Reporting
from engines.sglang.engine import Engine
from engines.sglang.messages import Description
from engines.sglang.settings import SglangSettings
from engines.telemetry import Recorder, Telemetry, connect
from engines.types import EngineInfo

log = structlog.get_logger(__name__)
Export = Callable[[Collector], None]
"""Has the engine's metrics exported, once it is known which engine it is."""


class Frontend(Protocol):
    """SGLang's HTTP process."""

    @property
    def model(self) -> str: ...
    @property
    def host_port(self) -> tuple[str, int]: ...
    def start(self) -> None:
        """Take answers from the scheduler."""
        ...


def extend_lifespan(app: FastAPI, run: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Have `run` around everything that the app serves, within what it does by itself."""
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(lived: Any) -> AsyncIterator[Any]:
        async with original(lived) as state, run():
            yield state

    app.router.lifespan_context = lifespan


@asynccontextmanager
async def running(
    frontend: Frontend, engine: Engine, recorder: Recorder, settings: SglangSettings, export: Export
) -> AsyncIterator[None]:
    """The engine's own tasks, beside the block."""
    frontend.start()
    task = asyncio.create_task(_loudly(serve(frontend, engine, recorder, settings, export)))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await engine.aclose()


async def serve(
    frontend: Frontend, engine: Engine, recorder: Recorder, settings: SglangSettings, export: Export
) -> None:
    """Learn what this engine is, then say so in its metrics and in Redis until cancelled."""
    await engine.open(lambda found: info_of(found, frontend, settings))
    log.info("microserving verbs are there", engine_id=engine.info.engine_id, url=engine.info.url)
    async with _telemetry(engine, recorder, settings) as telemetry, asyncio.TaskGroup() as group:
        export(_collector(engine, recorder, telemetry))
        group.create_task(_keep_load_fresh(engine, settings.heartbeat_s))
        if telemetry is not None:
            group.create_task(telemetry.run())


@asynccontextmanager
async def _telemetry(engine: Engine, recorder: Recorder, settings: SglangSettings) -> AsyncIterator[Telemetry | None]:
    if settings.redis_url is None:
        yield None
        return
    async with connect(settings.redis_url) as redis:
        yield Telemetry(redis, engine.info, engine.last_load, recorder, settings.heartbeat_s)


def _collector(engine: Engine, recorder: Recorder, telemetry: Telemetry | None) -> EngineCollector:
    def reporting() -> Reporting:
        return Reporting(recorder.dropped, None if telemetry is None else telemetry.redis_answers)

    return EngineCollector(engine.info, engine.counters, engine.last_load, reporting)


def info_of(found: Description, frontend: Frontend, settings: SglangSettings) -> EngineInfo:
    host, port = frontend.host_port
    return EngineInfo(
        engine_id=found.engine_id,
        url=(settings.advertise_url or f"http://{host}:{port}").rstrip("/"),
        kind=settings.kind or f"sglang-{found.device}-{frontend.model}",
        model=frontend.model,
        context_length_tokens=min(found.context_length_tokens, found.kv_capacity_tokens),
        kv_capacity_tokens=found.kv_capacity_tokens,
        kv_layout=found.peer.layout,
        transports=found.transports,
        epoch=found.peer.epoch,
    )


async def _keep_load_fresh(engine: Engine, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await engine.load()


async def _loudly(work: Coroutine[Any, Any, None]) -> None:
    """Nobody waits for this task while the server runs, so a defect has to be said; SGLang goes on serving."""
    try:
        await work
    except Exception:  # the edge of a task that nobody awaits
        log.exception("defect: no heartbeat, telemetry or fresh load of this engine from now on; restart it")
