"""The control tick: observe, search elsewhere, decide, publish, write down. One leader decides; the others observe."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from controller import search_jobs
from controller.admin.modes import ModeDocument
from controller.admin.plans import REASON_CHARS, PlanChange
from controller.admin.services import Services
from controller.controller_metrics import ControllerMetrics
from controller.decisions import DecisionRecord, record_of
from controller.leadership import Leadership
from controller.observing import Observer
from controller.search_worker import SearchWorker, WorkerFailed
from controller.store.keys import Keys
from controller.store.protocol import Lease, LostLease, Store, StoreUnavailable, VersionConflict
from tuner.plan import BadDocument, Plan
from tuner.settings import TunerSettings
from tuner.slo import SloTable
from tuner.types import Decision, Mode, Observation

if TYPE_CHECKING:
    from tuner.tick import Tuner

SEARCH_LIMIT_S = 60.0
"""A search that takes this much longer than its budget is stuck. On a machine that is only busy it would be a waste to
end it: the next one would have to start a process first."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class InForce:
    """The documents that a tick goes by."""

    plan: Plan
    slos: SloTable
    mode: ModeDocument


@dataclass(frozen=True, slots=True)
class LoopSettings:
    controller_id: str
    tick_s: float
    recovery_s: float
    """After the store was away: how long until engines and routers have all reported again."""
    tuner: TunerSettings


class Recovery:
    """Whether the store can be believed. After it was away or lost its data, engines and routers report bit by bit;
    until then, what is missing means nothing."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._away = False
        self._until_s = 0.0
        self._plan: Plan | None = None

    def away(self) -> bool:
        """The store did not answer; true if that is news."""
        news, self._away = not self._away, True
        return news

    def is_over(self, plan: Plan, at_s: float) -> bool:
        """The store answered at `at_s` (monotonic) and holds `plan`: whether what it says can be acted on."""
        if self._away or self._went_back(plan):
            log.info("the store is back; waiting until everybody has reported", seconds=self._wait_s)
            self._until_s = at_s + self._wait_s
        self._away, self._plan = False, plan
        return at_s >= self._until_s

    def _went_back(self, plan: Plan) -> bool:
        """Versions only grow, unless the store has lost its data."""
        last = self._plan
        return last is not None and plan != last and plan.version <= last.version


class ControlLoop:
    """Owns nothing that it is given. `now_s` is Unix time, `clock` monotonic.

    While the store is away no tick decides anything, and what was observed before is kept.
    """

    def __init__(
        self,
        services: Services,
        keys: Keys,
        observer: Observer,
        leadership: Leadership,
        worker: SearchWorker,
        metrics: ControllerMetrics,
        settings: LoopSettings,
        now_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._services = services
        self._observer = observer
        self._leadership = leadership
        self._worker = worker
        self._metrics = metrics
        self._settings = settings
        self._now_s = now_s
        self._clock = clock
        self._study = StoredBytes(services.store, keys.study)
        self._models = StoredBytes(services.store, keys.models)
        self._recovery = Recovery(settings.recovery_s)
        self._tuner: Tuner | None = None
        self._led_under: int | None = None
        """Token of the lease that the tuner was made or last brought up to date for."""
        self._has_models = False
        self.observation: Observation | None = None
        """Of the last tick, on leaders and others."""

    async def run(self) -> None:
        """Tick until cancelled. Nothing that goes wrong in a tick ends the loop."""
        while True:
            began_s = self._clock()
            await self._tick_whatever_happens()
            await asyncio.sleep(max(0.0, self._settings.tick_s - (self._clock() - began_s)))

    async def tick(self) -> DecisionRecord | None:
        """One round; `None` if there was nothing to decide by, or it is another's to decide."""
        began_s, now_s = self._clock(), self._now_s()
        lease = self._leadership.lease
        tuner = await self._tuner_of(lease)
        found = await self._in_force()
        if found is None:
            return None
        observation = await self._observe(now_s, found, tuner)
        trusted = self._recovery.is_over(found.plan, self._clock())
        if lease is None or tuner is None or not trusted:
            return None
        decision = await self._decide(tuner, observation, found.mode.mode)
        outcome = await self._publish(tuner, decision, observation, found.mode, lease)
        record = record_of(
            decision,
            at_s=self._now_s(),
            controller_id=self._settings.controller_id,
            mode=found.mode.mode,
            plan_version=found.plan.version,
            published_version=outcome.version,
            refused=outcome.refused,
            tick_s=self._clock() - began_s,
        )
        await self._write_down(record, tuner, lease)
        return record

    async def _tick_whatever_happens(self) -> None:
        try:
            await self.tick()
        except StoreUnavailable as error:
            self._metrics.store_answers(up=False)
            if self._recovery.away():
                log.warning("the store is away; nothing is decided until it is back", error=str(error))
            return
        except BadDocument as error:
            log.error("a document in the store is none; put another", error=str(error))
        except WorkerFailed as error:
            log.error("no search this tick", error=str(error))
            self._metrics.tick_failures.inc()
        except Exception:  # one bad tick must take neither the API nor the next tick with it
            log.exception("tick failed")
            self._metrics.tick_failures.inc()
        self._metrics.store_answers(up=True)

    async def _tuner_of(self, lease: Lease | None) -> "Tuner | None":
        """The leader's tuner, which goes on from where the last leader was; `None` for whoever does not lead."""
        if lease is None:
            return None
        if self._tuner is None or self._led_under != lease.token:
            raw = await self._study.read()
            # A store that lost its data knows less than whoever led before.
            if raw is not None or self._tuner is None:
                self._tuner = await asyncio.to_thread(_make_tuner, self._settings.tuner, raw)
            self._led_under = lease.token
        return self._tuner

    async def _in_force(self) -> InForce | None:
        """`None` while there is no plan: whoever keeps up the store issues one."""
        plan, slos, mode = await asyncio.gather(
            self._services.plans.current(), self._services.slos.current(), self._services.modes.current()
        )
        if plan is None:
            return None
        self._metrics.in_force(plan.version, mode.mode)
        return InForce(plan, slos, mode)

    async def _observe(self, now_s: float, found: InForce, tuner: "Tuner | None") -> Observation:
        if not self._has_models:
            self._observer.restore(await self._models.read())
            self._has_models = True
        await self._observer.catch_up(now_s)
        since_s = _since_issued if tuner is None else tuner.measured_since_s
        # Arithmetic of a tenth of a second or more, which the API must not feel.
        self.observation = await asyncio.to_thread(self._observer.observe, now_s, found.plan, found.slos, since_s)
        return self.observation

    async def _decide(self, tuner: "Tuner", observation: Observation, mode: Mode) -> Decision:
        task = None if mode is Mode.PAUSED else tuner.prepare(observation)
        limit_s = self._settings.tuner.budget_s + SEARCH_LIMIT_S
        result = None if task is None else await self._worker.run(limit_s, search_jobs.search, task)
        return tuner.decide(observation, result, mode)

    async def _publish(
        self, tuner: "Tuner", decision: Decision, observation: Observation, mode: ModeDocument, lease: Lease
    ) -> "Outcome":
        """Put the plan of a decision in force, unless somebody has changed something since the tick began."""
        if decision.chosen is None:
            return Outcome()
        if (await self._services.modes.current()).version != mode.version:
            return Outcome(refused="somebody has changed the mode meanwhile")
        draft = tuner.draft(decision, observation)
        change = PlanChange(
            pattern=draft.pattern,
            knobs=draft.knobs,
            roles=draft.roles,
            reason=draft.reason[:REASON_CHARS],
            replicas=draft.replicas,
        )
        try:
            plan = await self._services.plans.issue_as_tuner(change, observation.plan.version, lease)
        except VersionConflict as conflict:
            return Outcome(refused=f"somebody has put plan {conflict.actual} in force meanwhile")
        except LostLease:
            return Outcome(refused="another controller leads by now")
        tuner.published(plan.version, decision, observation, self._now_s())
        return Outcome(version=plan.version)

    async def _write_down(self, record: DecisionRecord, tuner: "Tuner", lease: Lease) -> None:
        """Keep the decision, and what a new leader needs to go on from here."""
        log.info("decided", reason=record.reason, plan=record.published_version, refused=record.refused)
        self._metrics.ticked(record)
        await self._services.decisions.write(record)
        try:
            await self._study.write(tuner.state(), lease)
            await self._models.write(self._observer.learnt(), lease)
        except LostLease as lost:
            log.info("what was learnt is not kept: another controller leads", error=str(lost))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a decision: the version of its plan, or why it did not come into force."""

    version: int | None = None
    refused: str | None = None


class StoredBytes:
    """Something that only the leader writes and every later leader reads."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    async def read(self) -> bytes | None:
        found = await self._store.get(self._key)
        return None if found is None else found.value

    async def write(self, value: bytes, lease: Lease) -> None:
        """Raises `LostLease` for anybody but the holder."""
        found = await self._store.get(self._key)
        if found is not None and found.value == value:
            return
        await self._store.compare_and_set(self._key, value, None if found is None else found.version, lease)


def _make_tuner(settings: TunerSettings, raw: bytes | None) -> "Tuner":
    """A tuner that goes on from a state; a state of another version is no reason not to start."""
    from tuner.tick import Tuner

    if raw is None:
        return Tuner(settings)
    try:
        return Tuner.restore(settings, raw)
    except ValueError as error:
        log.warning("the last leader's state is of no use; starting anew", error=str(error))
        return Tuner(settings)


def _since_issued(plan: Plan) -> float:
    return plan.issued_at_s
