"""The tuner as part of a controller process: leadership, search worker and loop, started and ended together."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from controller import search_jobs
from controller.admin.services import Services
from controller.controller_metrics import ControllerMetrics, Seen
from controller.leadership import Leadership
from controller.loop import ControlLoop, LoopSettings
from controller.observing import Observer
from controller.search_worker import SearchWorker
from controller.settings import AdminSettings
from controller.store.keys import Keys
from engines.emulated.profile import Profile
from tuner.types import Observation

if TYPE_CHECKING:
    from tuner.latency import LatencyModels
    from tuner.warm_up import WarmUp

OBSERVED_S = 600.0
"""Traffic that is kept, at least."""

log = structlog.get_logger(__name__)


class Tuning:
    """`run` it beside the API. Until it has warmed up it observes nothing, and nothing has to wait for it."""

    def __init__(
        self,
        services: Services,
        settings: AdminSettings,
        metrics: ControllerMetrics,
        now_s: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services = services
        self._settings = settings
        self._metrics = metrics
        self._now_s = now_s
        self._clock = clock
        self._keys = Keys(settings.model)
        self._leadership = Leadership(
            services.store, self._keys.leader, settings.controller_id, settings.lease_s, clock
        )
        self._observer: Observer | None = None
        self._loop: ControlLoop | None = None
        self.worker = SearchWorker(search_jobs.prepare)
        metrics.follow(self._leads, lambda: self._leadership.times, self._seen)

    @property
    def observation(self) -> Observation | None:
        """What the last tick knew; `None` before the first."""
        return None if self._loop is None else self._loop.observation

    async def run(self) -> None:
        """Tune until cancelled; then nothing of it is left, and another controller may lead at once."""
        async with contextlib.aclosing(self.worker), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.worker.warm_up())
            # Imports of a second or more, which would stall the API.
            self._observer = await asyncio.to_thread(self._new_observer)
            self._loop = self._new_loop(self._observer)
            tasks.create_task(self._leadership.run())
            tasks.create_task(self._loop.run())

    def _new_observer(self) -> Observer:
        from tuner.latency import LatencyModels
        from tuner.latency_prior import shipped_priors
        from tuner.observe import Window

        window = Window(span_s=max(OBSERVED_S, self._settings.tuner.window_s))
        priors = shipped_priors()

        def new_models(learnt: bytes | None) -> LatencyModels:
            return _models(priors, window.warm_up, learnt)

        return Observer(self._services.store, self._keys, window, new_models, self._settings.tuner.window_s)

    def _new_loop(self, observer: Observer) -> ControlLoop:
        settings = LoopSettings(
            controller_id=self._settings.controller_id,
            tick_s=self._settings.tick_s,
            recovery_s=self._settings.recovery_s,
            tuner=self._settings.tuner,
        )
        return ControlLoop(
            self._services,
            self._keys,
            observer,
            self._leadership,
            self.worker,
            self._metrics,
            settings,
            self._now_s,
            self._clock,
        )

    def _leads(self) -> bool:
        return self._leadership.lease is not None

    def _seen(self) -> Seen:
        return Seen() if self._observer is None else self._observer.seen()


def _models(priors: Mapping[str, Profile], warm_up: "WarmUp", learnt: bytes | None) -> "LatencyModels":
    """Models that go on from an earlier controller's; what is of no use is left."""
    from tuner.latency import LatencyModels

    if learnt is not None:
        try:
            return LatencyModels.from_state(learnt, priors, warm_up)
        except ValueError as error:
            log.warning("the latency models in the store are of no use; starting anew", error=str(error))
    return LatencyModels(priors, warm_up)
