"""The engines a router knows, what runs on them, and whether they can be used."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from controller.heartbeats import Heartbeats
from controller.store import StoreUnavailable
from engines.client import EngineClient
from engines.errors import EngineError
from engines.types import PROTOCOL_VERSION, EngineInfo, EngineLoad
from tuner.placement import EngineView
from tuner.plan import Plan

log = structlog.get_logger()


class Lease:
    """A request's hold on an engine, counted from its start to `release`, which may be called any number of times."""

    __slots__ = ("_engine", "_prefill_tokens", "_released")

    def __init__(self, engine: "Engine", prefill_tokens: int) -> None:
        self._engine = engine
        self._prefill_tokens = prefill_tokens
        self._released = False
        engine.own_inflight += 1
        engine.own_pending_tokens += prefill_tokens
        free_tokens = engine.view.kv_free_tokens - prefill_tokens
        engine.view.kv_free_tokens = free_tokens if free_tokens > 0 else 0
        engine.refresh()

    def prefilled(self) -> None:
        """The prompt is done (first token, or KV sent): it no longer waits for prefill."""
        if self._prefill_tokens:
            self._engine.own_pending_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            self._engine.refresh()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._engine.own_inflight -= 1
            self._engine.own_pending_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            self._engine.refresh()


class TransferSlot:
    """One of the transfers that a decode engine may receive at a time, from before its reservation to `release`.

    Its request is in flight there by then: it will decode there and nowhere else, unless something fails.
    """

    __slots__ = ("_engine", "_released")

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._released = False
        engine.own_transfers += 1
        engine.own_inflight += 1
        engine.refresh()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._engine.own_transfers -= 1
            self._engine.own_inflight -= 1
            self._engine.refresh()


@dataclass(slots=True)
class Engine:
    """One engine as this router sees it."""

    info: EngineInfo
    client: EngineClient
    view: EngineView
    reported: EngineLoad = field(default_factory=EngineLoad)
    own_inflight: int = 0
    own_pending_tokens: int = 0
    own_transfers: int = 0
    answers: bool = False
    """Whether the last poll succeeded, if only to say that the engine drains."""
    unreported: list[Lease] = field(default_factory=list)
    """Whose prefill nothing will tell the end of, until the engine's own figure is newer than they are."""
    _reported_inflight: int = 0

    @property
    def engine_id(self) -> str:
        return self.info.engine_id

    def refresh(self) -> None:
        """The larger of what this router has in flight and what the engine reports; see `EngineView`."""
        view, reported = self.view, self.reported
        own, seen = self.own_inflight, self._reported_inflight
        view.inflight = own if own > seen else seen
        own, seen = self.own_pending_tokens, reported.pending_prefill_tokens
        view.pending_prefill_tokens = own if own > seen else seen

    def report(self, load: EngineLoad, covered: int = 0) -> None:
        """Take in a fresh load snapshot; an engine that answers and does not drain is available.

        The first `covered` of `unreported` were under way when it was asked for: what they still wait for is in it.
        """
        for lease in self.unreported[:covered]:
            lease.prefilled()
        del self.unreported[:covered]
        self.answers = True
        self.reported = load
        self._reported_inflight = load.running + load.queued
        self.view.available = not load.draining
        self.view.kv_free_tokens = load.kv_free_tokens
        self.view.prefill_tokens_per_s = load.prefill_tokens_per_s
        self.refresh()

    def failed(self) -> None:
        """The engine did not answer: use it no more until a poll succeeds."""
        self.answers = False
        self.view.available = False


class Fleet:
    """Finds engines (given addresses, and heartbeats in the store) and keeps their loads fresh.

    Liveness does not depend on the store: each engine is polled directly. An engine leaves when its heartbeat is
    gone *and* it does not answer; while the store is away, nobody leaves.
    """

    def __init__(
        self,
        model: str,
        given: Sequence[str],
        connect: Callable[[str], EngineClient],
        on_change: Callable[[], None] = lambda: None,
        on_leave: Callable[[str], None] = lambda _: None,
        poll_s: float = 0.5,
    ) -> None:
        self._model = model
        self._given = frozenset(given)
        self._connect = connect
        self._on_change = on_change
        self._on_leave = on_leave
        self._poll_s = poll_s
        self._plan: Plan | None = None
        self._engines: dict[str, Engine] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self.views: list[EngineView] = []
        """Of all known engines, in the order they came; shared with the placer."""

    def __getitem__(self, engine_id: str) -> Engine:
        return self._engines[engine_id]

    def get(self, engine_id: str) -> Engine | None:
        return self._engines.get(engine_id)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    @property
    def available(self) -> int:
        return sum(view.available for view in self.views)

    def apply(self, plan: Plan) -> None:
        """Give every engine its role in the plan."""
        self._plan = plan
        for view in self.views:
            view.role = plan.role_of(view.engine_id)

    async def run(self, heartbeats: Heartbeats | None, every_s: float) -> None:
        """Follow the fleet until cancelled, then close all connections."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._reconcile(heartbeats, group)
                    await asyncio.sleep(every_s)
        finally:
            self._polls.clear()
            for engine in self._engines.values():
                await engine.client.aclose()

    async def _reconcile(self, heartbeats: Heartbeats | None, group: asyncio.TaskGroup) -> None:
        try:
            announced = {beat.info.url for beat in (await heartbeats.engines()).values()} if heartbeats else set()
        except StoreUnavailable:
            announced = set(self._polls)
        for url in (announced | self._given) - self._polls.keys():
            self._polls[url] = group.create_task(self._poll(url))
        for url in self._polls.keys() - announced - self._given:
            engine = self._at(url)
            if engine is None or not engine.answers:
                self._polls.pop(url).cancel()
                await self._remove(engine)

    async def _poll(self, url: str) -> None:
        try:
            client = self._connect(url)
        except ValueError as error:
            log.error("engine_refused", url=url, error=str(error))
            return
        try:
            while True:
                await self._ask(url, client)
                await asyncio.sleep(self._poll_s)
        finally:
            await client.aclose()

    async def _ask(self, url: str, client: EngineClient) -> None:
        """One poll: learn who is there if that is not known (or was interrupted), and its load."""
        engine = self._at(url)
        try:
            if engine is None or not engine.view.available:
                engine = await self._meet(url, await client.info(), client)
            if engine is not None:
                covered = len(engine.unreported)
                engine.report(await client.load(), covered)
        except EngineError as error:
            self._lost(engine, error.message)
        except Exception as error:
            # The polls share a task group: one that ended would take the streams of all engines with it.
            log.exception("poll_failed", url=url)
            self._lost(engine, type(error).__name__)
        self._on_change()

    def _lost(self, engine: Engine | None, why: str) -> None:
        if engine is not None and engine.answers:
            log.warning("engine_lost", engine=engine.engine_id, error=why)
            engine.failed()

    async def _meet(self, url: str, info: EngineInfo, client: EngineClient) -> Engine | None:
        known = self._at(url)
        if info.model != self._model or info.protocol_version != PROTOCOL_VERSION:
            log.error("engine_refused", url=url, model=info.model, protocol_version=info.protocol_version)
            return None
        if known is not None and known.info.epoch == info.epoch:
            return known
        twin = self._engines.get(info.engine_id)
        if twin is not None and twin.info.epoch == info.epoch and twin.view.available:
            return None  # the same engine under another address: it stays known by the first
        await self._remove(known)
        role = self._plan.role_of(info.engine_id) if self._plan else EngineView(info.engine_id).role
        engine = Engine(info, client, EngineView(info.engine_id, role, available=False))
        self._engines[info.engine_id] = engine
        self._list()
        log.info("engine_joined", engine=info.engine_id, url=url, kind=info.kind)
        return engine

    async def _remove(self, engine: Engine | None) -> None:
        if engine is not None and self._engines.get(engine.engine_id) is engine:
            del self._engines[engine.engine_id]
            self._list()
            self._on_leave(engine.engine_id)
            log.info("engine_left", engine=engine.engine_id)

    def _at(self, url: str) -> Engine | None:
        return next((engine for engine in self._engines.values() if engine.client.url == url), None)

    def _list(self) -> None:
        self.views[:] = [engine.view for engine in self._engines.values()]
