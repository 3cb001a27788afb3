"""One emulated engine as a process: sockets, engine, telemetry and server, wired, run and closed in order."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import structlog
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from engines import logs
from engines.emulated.engine import Clocks, Engine
from engines.emulated.kernel import Kernel
from engines.emulated.language import Language, load_tokenizer
from engines.emulated.link import Link
from engines.emulated.profile import Profile
from engines.emulated.server import create_app
from engines.emulated.settings import EmulatedSettings
from engines.emulated.shared_link import SharedLink
from engines.metrics import EngineCollector, Reporting
from engines.telemetry import Recorder, Telemetry, connect
from engines.tracing import open_tracer
from engines.types import EngineInfo
from engines.verb_spans import Traced

log = structlog.get_logger(__name__)
SERVICE = "trimtab-engine"
DRAIN_POLL_S = 0.02


def run(settings: EmulatedSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    logs.configure(settings.log_level)
    uvloop.run(serve(settings))
    return 0


async def serve(settings: EmulatedSettings) -> None:
    """Open everything, say so, wait to be stopped, let running requests finish for a while, close everything."""
    stop = _stop_on_signals()
    async with AsyncExitStack() as stack:
        http_socket = stack.enter_context(_bound(settings.host, settings.port))
        kv_socket = stack.enter_context(_bound(settings.kv_host, settings.kv_port))
        recorder = Recorder()
        engine = await stack.enter_async_context(running_engine(settings, http_socket, kv_socket, recorder))
        registry = CollectorRegistry()
        app = create_app(engine, registry, settings.max_body_bytes, lambda: uuid.uuid4().hex)
        tracer = await stack.enter_async_context(
            open_tracer(settings, SERVICE, settings.engine_id, engine.counters.lost_spans)
        )
        traced = app if tracer is None else Traced(app, tracer, time.monotonic)
        await stack.enter_async_context(_served(traced, http_socket))
        telemetry = await stack.enter_async_context(_telemetry(settings, engine, recorder))
        _register(registry, engine, recorder, telemetry)
        _say_ready(settings, engine.info)
        await stop.wait()
        await _drain(engine, settings.drain_s)


@asynccontextmanager
async def running_engine(
    settings: EmulatedSettings, http_socket: socket.socket, kv_socket: socket.socket, recorder: Recorder
) -> AsyncIterator[Engine]:
    """An engine whose passes run and whose transfer socket is served, until the block is left."""
    profile = settings.effective_profile()
    tokenizer = load_tokenizer()
    language = Language(tokenizer)
    link = Link(profile.bandwidth_bytes_per_s, profile.g_s)
    async with SharedLink(link, time.monotonic) as shared:
        engine = Engine(
            kernel=Kernel(profile, language.choose),
            info=_info(settings, profile, http_socket),
            kv_address=settings.kv_advertise or _address(kv_socket),
            tokenizer=tokenizer,
            language=language,
            link=shared,
            clocks=Clocks(monotonic=time.monotonic, wall=time.time),
            recorder=recorder,
            default_max_tokens=settings.default_max_tokens,
            transfer_stall_s=settings.transfer_stall_s,
        )
        server = await asyncio.start_server(engine.receiver.serve, sock=kv_socket)
        try:
            async with _background(engine.run()):
                yield engine
        finally:
            server.close()


@asynccontextmanager
async def _background(work: Any) -> AsyncIterator[None]:
    """Run a coroutine beside the block. If it fails, so does the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        try:
            yield
        finally:
            task.cancel()


@asynccontextmanager
async def _served(app: Any, http_socket: socket.socket) -> AsyncIterator[None]:
    """The app on a socket. Signals stay the caller's; streams that still run when the block is left are cut."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    server = _QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[http_socket]))
    try:
        await server.serving.wait()
        yield
    finally:
        server.should_exit = True
        await task


class _QuietServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to this module, which drains first."""
        yield


@asynccontextmanager
async def _telemetry(settings: EmulatedSettings, engine: Engine, recorder: Recorder) -> AsyncIterator[Telemetry | None]:
    if settings.redis_url is None:
        yield None
        return
    async with connect(settings.redis_url) as redis:
        telemetry = Telemetry(redis, engine.info, engine.load, recorder, settings.heartbeat_s)
        async with _background(telemetry.run()):
            yield telemetry


def _register(registry: CollectorRegistry, engine: Engine, recorder: Recorder, telemetry: Telemetry | None) -> None:
    def reporting() -> Reporting:
        return Reporting(recorder.dropped, telemetry.redis_answers if telemetry is not None else None)

    registry.register(EngineCollector(engine.info, engine.counters, engine.load, reporting))
    ProcessCollector(registry=registry)
    GCCollector(registry)


async def _drain(engine: Engine, drain_s: float) -> None:
    engine.drain(on=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while engine.busy:  # noqa: ASYNC110  once in a process's life; an event would cost every request
                await asyncio.sleep(DRAIN_POLL_S)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"


def _info(settings: EmulatedSettings, profile: Profile, http_socket: socket.socket) -> EngineInfo:
    return EngineInfo(
        engine_id=settings.engine_id,
        url=(settings.advertise_url or f"http://{_address(http_socket)}").rstrip("/"),
        kind=profile.kind,
        model=profile.model,
        context_length_tokens=min(profile.context_length_tokens, profile.kv_capacity_tokens),
        kv_capacity_tokens=profile.kv_capacity_tokens,
        kv_layout=profile.kv_layout,
        transports=("tcp",),
        epoch=secrets.token_hex(8),
    )


def _say_ready(settings: EmulatedSettings, info: EngineInfo) -> None:
    log.info("engine_serving", engine_id=info.engine_id, kind=info.kind, model=info.model, url=info.url)
    if settings.ready_file is not None:
        _write_whole(
            settings.ready_file, orjson.dumps({"url": info.url, "engine_id": info.engine_id, "pid": os.getpid()})
        )


def _write_whole(path: Path, content: bytes) -> None:
    """Readers see the whole file or none."""
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(content)
    draft.replace(path)
