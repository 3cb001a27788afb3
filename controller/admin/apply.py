"""Bringing the knobs that live inside engines in line with the plan."""

import asyncio
from collections.abc import Mapping

import structlog

from controller.admin.engine_calls import EngineCalls, UnknownEngine
from controller.admin.plans import PlanService
from controller.heartbeats import Heartbeats
from controller.store.protocol import StoreUnavailable
from engines.errors import EngineError
from engines.protocol import Config
from engines.telemetry import Heartbeat
from tuner.plan import BadDocument, Knobs

log = structlog.get_logger(__name__)


def wanted(knobs: Knobs) -> Config | None:
    """What the plan asks of every engine; `None` when it leaves engines as they are."""
    if knobs.chunked_prefill_tokens is None and knobs.prefill_decode_interval is None:
        return None
    return Config(
        chunked_prefill_tokens=knobs.chunked_prefill_tokens,
        prefill_decode_interval=knobs.prefill_decode_interval,
    )


class KnobApplier:
    """Tells each life of each engine the plan's knobs once, and again after any change of them."""

    def __init__(self, plans: PlanService, heartbeats: Heartbeats, calls: EngineCalls) -> None:
        self._plans = plans
        self._heartbeats = heartbeats
        self._calls = calls
        self._told: dict[str, tuple[str, Config]] = {}
        """Engine id → epoch of its process and what that process accepted."""

    async def run(self, poll_s: float = 1.0) -> None:
        """Keep engines in line until cancelled. A store that is away is waited for."""
        while True:
            try:
                await self.apply()
            except (StoreUnavailable, BadDocument) as error:
                log.warning("cannot see what engines should do", error=str(error))
            except Exception:  # one bad round must take neither the API nor the next round with it
                log.exception("engines could not be told their knobs")
            await asyncio.sleep(poll_s)

    async def apply(self) -> None:
        """One round. Engines that fail are tried again in the next."""
        plan = await self._plans.current()
        config = wanted(plan.knobs) if plan is not None else None
        live = await self._heartbeats.engines()
        self._told = {engine_id: told for engine_id, told in self._told.items() if engine_id in live}
        if config is not None:
            await self._tell_all(live, config)

    async def _tell_all(self, live: Mapping[str, Heartbeat], config: Config) -> None:
        async with asyncio.TaskGroup() as calls:
            for engine_id, beat in live.items():
                if self._told.get(engine_id) != (beat.info.epoch, config):
                    calls.create_task(self._tell(engine_id, beat.info.epoch, config))

    async def _tell(self, engine_id: str, epoch: str, config: Config) -> None:
        try:
            await self._calls.configure(engine_id, config)
        except (EngineError, UnknownEngine, StoreUnavailable) as error:
            log.warning("engine did not take the knobs", engine_id=engine_id, error=str(error))
            return
        self._told[engine_id] = (epoch, config)
        log.info("engine took the knobs", engine_id=engine_id, knobs=config)
