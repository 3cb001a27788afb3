"""The router process: wires its parts together, serves until told to stop, then drains."""

import asyncio
import gc
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from importlib.metadata import version

import msgspec
import structlog
import uvloop
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, disable_created_metrics, multiprocess

from controller.heartbeats import Heartbeats, RouterBeat
from controller.metrics import RouterMetrics
from controller.metrics_in_force import InForceCollector, RouterIdentity
from controller.router.board import Board
from controller.router.call import Desk
from controller.router.fleet import Fleet
from controller.router.http import HttpServer
from controller.router.openai import ApiError
from controller.router.patterns import load_patterns
from controller.router.records import Recorder
from controller.router.replicate import Replicator
from controller.router.service import Service
from controller.router.tokens import open_token_source
from controller.router.waiting import Lack, RoomQueue
from controller.router.workers import MULTIPROCESS_DIR, announce, run_workers
from controller.settings import RouterSettings
from controller.store import Keys, Store, StoreUnavailable, open_store
from engines import logs
from engines.client import EngineClient, VerbTimeouts
from engines.metrics import expose
from engines.tracing import open_tracer
from tuner.plan import Plan
from tuner.prefix import PrefixIndex

log = structlog.get_logger()

SERVICE = "trimtab-router"
BACKLOG = 2048
HEARTBEAT_TTLS = 3
GC_THRESHOLD = 100_000
RESTART_AFTER_S = 1.0
ERRAND_S = 2.0
"""How long aborts on engines may take once the router has stopped serving."""


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    if settings.workers > 1:
        logs.configure(settings.log_level)
        return run_workers(settings, run_one)
    return run_one(settings)


def run_one(settings: RouterSettings) -> int:
    """One router process."""
    logs.configure(settings.log_level)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # Prometheus would keep one more series for each other
    return uvloop.run(_serve(settings))


async def _serve(settings: RouterSettings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    _calm_garbage_collector()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    async with router(settings) as running:
        log.info("router_serving", url=running.url, router_id=settings.router_id, model=settings.model)
        await stop.wait()
        await running.drain(settings.drain_s)
    return 0


def _calm_garbage_collector() -> None:
    """Requests make no cycles that matter; full collections over everything ever imported stall all streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 50, 100)


class RunningRouter:
    """A router that serves; made by `router`."""

    def __init__(self, service: Service, http: HttpServer, server: asyncio.Server, url: str) -> None:
        self.service = service
        self.http = http
        self.url = url
        self._server = server

    async def drain(self, limit_s: float) -> None:
        """Take no new connection, finish what runs and send it whole, for at most `limit_s` seconds."""
        self.service.draining = True
        self._server.close()
        self.http.finish()
        try:
            async with asyncio.timeout(limit_s):
                await self.service.drained()
                await self.http.closed()  # an answer that is complete here may still be on its way to a slow client
        except TimeoutError:
            log.warning("drain_cut_short", inflight=self.service.inflight, connections=self.http.connections)


@asynccontextmanager
async def router(settings: RouterSettings) -> AsyncIterator[RunningRouter]:
    """A serving router. Everything it starts ends with the context, in reverse order."""
    loop = asyncio.get_running_loop()
    registry, exposed = _registries()
    metrics = RouterMetrics(registry)
    keys = Keys(settings.model)
    async with AsyncExitStack() as stack:
        store = await _open_store(settings.redis_url, stack)
        recorder = Recorder(store, keys, settings.router_id, settings.record_buffer, metrics, _wall_offset_s)
        if store is not None:
            stack.push_async_callback(_leave, store, keys.router(settings.router_id), recorder)
        on_lost = metrics.spans_lost.inc
        tracer = await stack.enter_async_context(open_tracer(settings, SERVICE, settings.router_id, on_lost))
        tasks = await stack.enter_async_context(_Background(grace_s=0))
        errands = await stack.enter_async_context(_Background(ERRAND_S))
        desk = _desk(settings, loop)
        replicator = Replicator(desk, metrics, errands.start, secrets.token_hex(4))
        board = Board(load_patterns(), metrics, partial(_apply, desk.fleet, replicator))
        exposition = partial(expose, exposed)
        service = Service(
            settings, desk, board, recorder, replicator, metrics, exposition, errands.start, time.time, tracer
        )
        http = HttpServer(service, _refusal, settings.limits, loop, time.monotonic, time.time, service.gate)
        exposed.register(_in_force(settings, board, desk))
        _follow_gauges(metrics, service, desk, http, recorder)
        server = await _listen(settings, http, loop)
        stack.push_async_callback(_close, server, http)
        running = RunningRouter(service, http, server, _url(settings, server))
        tasks.keep(http.sweep)
        tasks.keep(recorder.run)
        heartbeats = Heartbeats(store, keys) if store is not None else None
        tasks.keep(partial(desk.fleet.run, heartbeats, settings.heartbeat_s))
        if store is not None:
            tasks.keep(partial(board.follow, store, keys))
            tasks.keep(partial(_heartbeat, settings, store, keys, board, metrics, running))
        if settings.ready_file is not None:
            announce(settings.ready_file, running.url, settings.router_id)
        yield running


class _Background:
    """Tasks that nobody awaits. One that fails is logged and the router serves on; one that is to be kept begins anew.

    On exit they get `grace_s` to finish and are then cancelled.
    """

    def __init__(self, grace_s: float, pause_s: float = RESTART_AFTER_S) -> None:
        self._grace_s = grace_s
        self._pause_s = pause_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def keep(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` for as long as the router does; if it fails, again after a pause."""
        self.start(self._kept(work))

    async def _kept(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        while True:
            try:
                return await work()
            except Exception:  # the edge of each such task: what it has not foreseen is said, and tried again
                log.exception("background_task_failed", task=_name(work))
            await asyncio.sleep(self._pause_s)

    async def __aenter__(self) -> "_Background":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_task_failed", task=task.get_coro().__qualname__, exc_info=error)  # type: ignore[union-attr]


def _name(work: Callable[[], object]) -> str:
    return getattr(work.func if isinstance(work, partial) else work, "__qualname__", repr(work))


def _desk(settings: RouterSettings, loop: asyncio.AbstractEventLoop) -> Desk:
    prefixes = PrefixIndex()
    room = RoomQueue(settings.limits.queue)
    timeouts = VerbTimeouts(**settings.timeouts.model_dump())
    fleet = Fleet(
        settings.model,
        settings.engines,
        partial(EngineClient, timeouts=timeouts),
        on_change=room.wake,
        on_leave=prefixes.forget,
        poll_s=settings.load_poll_s,
    )
    return Desk(fleet, prefixes, room, open_token_source(settings.tokenizer), settings.limits, loop, time.monotonic)


def _apply(fleet: Fleet, replicator: Replicator, plan: Plan) -> None:
    """What a plan changes beside how requests are placed."""
    fleet.apply(plan)
    replicator.apply(plan)


def _registries() -> tuple[CollectorRegistry, CollectorRegistry]:
    """Where metrics go, and what `/metrics` shows: with several workers, the sums of what all of them wrote."""
    registry = CollectorRegistry()
    if MULTIPROCESS_DIR not in os.environ:
        ProcessCollector(registry=registry)
        GCCollector(registry)
        return registry, registry
    exposed = CollectorRegistry()
    multiprocess.MultiProcessCollector(exposed)  # type: ignore[no-untyped-call]
    return registry, exposed


def _in_force(settings: RouterSettings, board: Board, desk: Desk) -> InForceCollector:
    identity = RouterIdentity(settings.router_id, settings.model, version("trimtab"))
    return InForceCollector(identity, lambda: board.plan, lambda: board.slos, lambda: desk.fleet.views)


async def _open_store(url: str | None, stack: AsyncExitStack) -> Store | None:
    if url is None:
        return None
    store = open_store(url)
    stack.push_async_callback(store.aclose)
    return store


async def _listen(settings: RouterSettings, http: HttpServer, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
    context = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return await loop.create_server(
        http.protocol,
        settings.host,
        settings.port,
        ssl=context,
        backlog=BACKLOG,
        reuse_port=settings.workers > 1 or None,
    )


def _wall_offset_s() -> float:
    return time.time() - time.monotonic()


def _url(settings: RouterSettings, server: asyncio.Server) -> str:
    scheme = "https" if settings.tls_cert is not None else "http"
    listening: socket.socket = server.sockets[0]
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _heartbeat(
    settings: RouterSettings, store: Store, keys: Keys, board: Board, metrics: RouterMetrics, running: RunningRouter
) -> None:
    """Say that this router lives and which plan it has applied; at once when that changes."""
    key, ttl_s = keys.router(settings.router_id), HEARTBEAT_TTLS * settings.heartbeat_s
    while True:
        beat = RouterBeat(
            router_id=settings.router_id,
            url=running.url,
            plan_version=board.plan.version,
            slo_version=board.slos.version,
            inflight=running.service.inflight,
            draining=running.service.draining,
            workers=settings.workers,
        )
        try:
            await store.heartbeat(key, msgspec.json.encode(beat), ttl_s)
            metrics.store_seen(up=True)
        except StoreUnavailable as error:
            if metrics.store_seen(up=False):
                log.warning("store_away", error=str(error))
        await board.changed(settings.heartbeat_s)


async def _leave(store: Store, key: str, recorder: Recorder) -> None:
    """Hand in the last records and vanish from the list of routers at once."""
    await recorder.flush()
    try:
        await store.forget(key)
    except StoreUnavailable as error:
        log.warning("left_without_saying", error=str(error))


async def _close(server: asyncio.Server, http: HttpServer) -> None:
    server.close()
    http.abort()
    await http.closed()


def _refusal(status: int, sentence: str) -> tuple[bytes, bytes]:
    error = ApiError(status, sentence, code="invalid_api_key" if status == HTTPStatus.UNAUTHORIZED else "bad_http")
    return error.body(), error.headers()


def _follow_gauges(metrics: RouterMetrics, service: Service, desk: Desk, http: HttpServer, recorder: Recorder) -> None:
    metrics.follow("inflight_requests", lambda: service.inflight)
    for lack in Lack:
        metrics.follow("waiting_requests", partial(desk.room.waiting.__getitem__, lack), lack=lack.value)
    metrics.follow("inflight_transfers", lambda: sum(engine.own_transfers for engine in desk.fleet))
    metrics.follow("client_connections", lambda: http.connections)
    metrics.follow("records_buffered", lambda: len(recorder))
