"""Calling one engine by id: draining it, turning its knobs."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import structlog

from controller.heartbeats import Heartbeats
from engines.client import EngineClient
from engines.errors import EngineUnreachable
from engines.protocol import Config
from engines.telemetry import Heartbeat

Connect = Callable[[str], EngineClient]
"""From an engine's URL to a client that the caller closes."""

log = structlog.get_logger(__name__)


class UnknownEngine(Exception):
    """No live engine has this id."""

    def __init__(self, engine_id: str, live: Mapping[str, Heartbeat]) -> None:
        super().__init__(f"there is no live engine {engine_id!r}; live are: {', '.join(live) or 'none'}")


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """Raises `UnknownEngine` for an id without a heartbeat and `EngineError` for what the engine answered.

    An engine that announces an address of no use is an `EngineUnreachable`.
    """

    heartbeats: Heartbeats
    connect: Connect

    async def drain(self, engine_id: str, on: bool) -> None:
        """Have an engine refuse new work and finish what runs, or take work again."""
        async with self.client(engine_id) as engine:
            await engine.drain(on)
        log.info("engine drains" if on else "engine takes work again", engine_id=engine_id)

    async def configure(self, engine_id: str, config: Config) -> Config:
        """Turn an engine's live knobs; the values now in force."""
        async with self.client(engine_id) as engine:
            return await engine.config(config)

    @contextlib.asynccontextmanager
    async def client(self, engine_id: str) -> AsyncIterator[EngineClient]:
        """A client of one live engine, closed at the end."""
        live = await self.heartbeats.engines()
        if engine_id not in live:
            raise UnknownEngine(engine_id, live)
        async with contextlib.aclosing(self._connected(engine_id, live[engine_id].info.url)) as client:
            yield client

    def _connected(self, engine_id: str, url: str) -> EngineClient:
        try:
            return self.connect(url)
        except ValueError as error:
            raise EngineUnreachable(f"engine {engine_id!r} announces an address of no use: {error}") from error
