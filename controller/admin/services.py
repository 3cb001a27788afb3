"""Everything the admin API works with, wired once."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from controller.admin.apply import KnobApplier
from controller.admin.engine_calls import Connect, EngineCalls
from controller.admin.migrations import MigrationService
from controller.admin.modes import ModeService
from controller.admin.patterns import KnownPatterns, installed_patterns
from controller.admin.pins import PinService
from controller.admin.plans import PlanService
from controller.admin.slos import SloService
from controller.decisions import DecisionLog
from controller.heartbeats import Heartbeats
from controller.store.keys import Keys
from controller.store.protocol import Store
from engines.client import EngineClient


@dataclass(frozen=True, slots=True)
class Services:
    store: Store
    keys: Keys
    plans: PlanService
    slos: SloService
    modes: ModeService
    pins: PinService
    decisions: DecisionLog
    heartbeats: Heartbeats
    calls: EngineCalls
    migrations: MigrationService
    applier: KnobApplier

    @classmethod
    def wire(
        cls,
        store: Store,
        model: str,
        now_s: Callable[[], float] = time.time,
        known: KnownPatterns = installed_patterns,
        connect: Connect = EngineClient,
    ) -> Self:
        """The store stays the caller's to close."""
        keys = Keys(model)
        plans = PlanService(store, keys, now_s, known)
        modes = ModeService(store, keys, now_s)
        heartbeats = Heartbeats(store, keys)
        calls = EngineCalls(heartbeats, connect)
        return cls(
            store=store,
            keys=keys,
            plans=plans,
            slos=SloService(store, keys),
            modes=modes,
            pins=PinService(plans, modes),
            decisions=DecisionLog(store, keys.decisions),
            heartbeats=heartbeats,
            calls=calls,
            migrations=MigrationService(store, keys, calls, now_s, lambda: secrets.token_hex(6)),
            applier=KnobApplier(plans, heartbeats, calls),
        )

    async def bootstrap(self) -> None:
        """Issue plan, SLOs and mode where there are none: those last seen if the store lost them, else the first."""
        await self.plans.bootstrap()
        await self.slos.bootstrap()
        await self.modes.bootstrap()
