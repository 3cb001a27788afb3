"""The plan and SLOs in force on a router, kept up with the store. Bad documents are refused and the old ones stay."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import structlog

from controller.metrics import RouterMetrics
from controller.router.call import Pattern
from controller.store import Keys, Store
from tuner.plan import BOOTSTRAP_PLAN, BadDocument, Plan, parse
from tuner.slo import BOOTSTRAP_SLOS, SloTable

log = structlog.get_logger()


class Board:
    """Read `plan`, `pattern` and `slos` at the start of a request; a request keeps the ones it started with."""

    def __init__(
        self,
        patterns: Mapping[str, Pattern],
        metrics: RouterMetrics,
        on_plan: Callable[[Plan], None] = lambda _: None,
    ) -> None:
        self._patterns = patterns
        self._metrics = metrics
        self._on_plan = on_plan
        self._news = asyncio.Event()
        self.slos = BOOTSTRAP_SLOS
        self.apply_plan(BOOTSTRAP_PLAN)

    def apply_plan(self, plan: Plan) -> None:
        """Put a whole plan in force. Raises `BadDocument` for a pattern that is not installed here."""
        if plan.pattern not in self._patterns:
            known = ", ".join(sorted(self._patterns))
            raise BadDocument(f"pattern: '{plan.pattern}' is not installed on this router; it has {known}")
        self.plan = plan
        self.pattern = self._patterns[plan.pattern]
        self._metrics.plan_applied(plan)
        self._on_plan(plan)
        self._news.set()

    def apply_slos(self, slos: SloTable) -> None:
        self.slos = slos
        self._news.set()

    async def changed(self, within_s: float) -> None:
        """Return when something was applied since the last call returned, or after `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._news.wait()
        self._news.clear()

    async def follow(self, store: Store, keys: Keys) -> None:
        """Keep up with the store until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_plan(store, keys.plan))
            group.create_task(self._follow_slos(store, keys.slo))

    async def _follow_plan(self, store: Store, key: str) -> None:
        async for found in store.watch(key):
            try:
                self.apply_plan(parse(Plan, found.value))
                log.info("plan_applied", version=self.plan.version, pattern=self.plan.pattern)
            except BadDocument as error:
                self._refused("plan", found.version, error)

    async def _follow_slos(self, store: Store, key: str) -> None:
        async for found in store.watch(key):
            try:
                self.apply_slos(parse(SloTable, found.value))
                log.info("slos_applied", version=self.slos.version)
            except BadDocument as error:
                self._refused("slo", found.version, error)

    def _refused(self, kind: str, version: int, error: BadDocument) -> None:
        self._metrics.documents_refused.labels(kind).inc()
        log.error("document_refused", kind=kind, version=version, error=str(error))
