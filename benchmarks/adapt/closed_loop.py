"""Trimtab from a cold start: the real window, models, search and decisions, in virtual time around the world.

Thinking is not free: a plan takes effect as late as the CPU time says that it took to find it.
"""

import contextlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from benchmarks.adapt.outcome import TICK_S, Change, Outcome
from benchmarks.adapt.statics import describe
from benchmarks.adapt.world import good_rows
from engines.emulated.profile import Profile
from engines.errors import EngineError
from engines.records import ArrivalBatch
from engines.types import EngineInfo
from tuner.candidates import candidate_of
from tuner.hot_prefixes import LOOKED_BACK_S
from tuner.latency import LatencyModels
from tuner.latency_prior import shipped_priors
from tuner.observe import Window
from tuner.plan import BOOTSTRAP_PLAN, IssuedBy, Plan
from tuner.search import search
from tuner.settings import TunerSettings
from tuner.slo import SloTable
from tuner.tick import Tuner
from tuner.twin.limits import BLOCK_TOKENS
from tuner.twin.prompts import prefix_hash, prefix_hashes
from tuner.twin.records import SimulatedRecord
from tuner.twin.reference import ReferenceFleet
from tuner.twin.reference_call import Call
from tuner.twin.types import Fleet
from tuner.types import Decision, EngineState, Mode, Observation
from tuner.workload import Workload

TRIMTAB = "trimtab"
EPOCH_S = 1_800_000_000.0
"""Unix time at which simulated time begins."""
ROUTER = "simulated"
BYTES_PER_TOKEN = 4
"""Of text: what the blocks of the prefix index assume."""

Clock = Callable[[], float]


def run_trimtab(
    workload: Workload, fleet: Fleet, slos: SloTable, clock: Clock, settings: TunerSettings | None = None
) -> Outcome:
    """The whole workload under whatever plans the tuner comes to. `clock` tells the CPU time that thinking took."""
    loop = ClosedLoop(fleet, slos, clock, settings or TunerSettings())
    loop.offer(workload)
    for tick in range(1, int(workload.span_s / TICK_S) + 1):
        loop.tick(tick * TICK_S)
    records = loop.finish()
    return Outcome(
        policy=TRIMTAB,
        plan=describe(candidate_of(loop.plan, loop.engine_states())),
        good=good_rows(records, loop.world, workload, slos),
        changes=loop.changes,
        thought_s=loop.thought_s,
    )


class ClosedLoop:
    """A world, and the controller's tick around it without its processes."""

    def __init__(self, fleet: Fleet, slos: SloTable, clock: Clock, settings: TunerSettings) -> None:
        self.plan = BOOTSTRAP_PLAN
        self.world = ReferenceFleet(fleet, self.plan, slos, keep_samples=True)
        self.changes: list[Change] = []
        self.thought_s = 0.0
        self._fleet = fleet
        self._infos = {engine.engine_id: engine_info(engine.engine_id, engine.profile) for engine in fleet}
        self._slos = slos
        self._clock = clock
        self._window = Window()
        self._models = LatencyModels(shipped_priors(), self._window.warm_up)
        self._tuner = Tuner(settings)
        self._settings = settings
        self._records: list[SimulatedRecord] = []
        self._new: list[SimulatedRecord] = []

    def offer(self, workload: Workload) -> None:
        self.world.offer(workload)

    def tick(self, now_s: float) -> Decision:
        """Let time pass until `now_s`, then observe, decide, and act when the thinking is done."""
        self._ended(self.world.advance(now_s))
        began_s = self._clock()
        self._take_in(now_s)
        observation = self._observe(now_s)
        task = self._tuner.prepare(observation)
        result = None if task is None else search(task, self._clock)
        decision = self._tuner.decide(observation, result, Mode.AUTO)
        spent_s = self._clock() - began_s
        self.thought_s += spent_s
        if decision.chosen is not None:
            self._act(decision, observation, now_s + min(spent_s, TICK_S))
        return decision

    def finish(self) -> list[SimulatedRecord]:
        """Serve what is still open; every request's record."""
        self._ended(self.world.advance())
        return self._records

    def engine_states(self) -> Sequence[EngineState]:
        loads = {engine.engine_id: engine.reported for engine in self.world.engines}
        return [
            EngineState(name, info.kind, self._models.profile_for(info.kind, info, loads[name]))
            for name, info in self._infos.items()
        ]

    def _ended(self, records: list[SimulatedRecord]) -> None:
        self._new += records
        self._records += records

    def _take_in(self, now_s: float) -> None:
        """What routers and engines would have written to the streams."""
        unix_s = EPOCH_S + now_s
        self._window.engines_seen({name: info.epoch for name, info in self._infos.items()}, unix_s)
        self._window.add_arrivals([arrival_batch(self.world.take_arrivals())], unix_s)
        self._window.add_requests([record.request_record(EPOCH_S, ROUTER) for record in self._new], unix_s)
        self._new = []
        samples = self.world.take_samples()
        self._models.add_passes([replace(each, at_s=EPOCH_S + each.at_s) for each in samples.passes])
        self._models.add_transfers([replace(each, at_s=EPOCH_S + each.at_s) for each in samples.transfers])
        self._models.refit()

    def _observe(self, now_s: float) -> Observation:
        unix_s = EPOCH_S + now_s
        since_s = self._tuner.measured_since_s(self.plan)
        return Observation(
            now_s=unix_s,
            engines=self.engine_states(),
            slos=self._slos,
            plan=self.plan,
            workload=self._window.workload(unix_s, self._settings.window_s),
            measured=self._window.measured(unix_s, self._slos, self.plan.version, since_s),
            hot=self._window.hot_contexts(unix_s, LOOKED_BACK_S, len(self._fleet)),
        )

    def _act(self, decision: Decision, observation: Observation, at_s: float) -> None:
        self._ended(self.world.advance(at_s))
        draft = self._tuner.draft(decision, observation)
        self.plan = Plan(
            version=self.plan.version + 1,
            issued_at_s=EPOCH_S + at_s,
            issued_by=IssuedBy.TUNER,
            reason=draft.reason,
            pattern=draft.pattern,
            knobs=draft.knobs,
            roles=draft.roles,
            replicas=draft.replicas,
        )
        self.world.set_plan(self.plan)
        self._copy()
        self._tuner.published(self.plan.version, decision, observation, EPOCH_S + at_s)
        candidate = candidate_of(self.plan, observation.engines)
        self.changes.append(Change(at_s, decision.reason.value, describe(candidate), decision.sentence))

    def _copy(self) -> None:
        """What routers would do about hot contexts, though at once."""
        for hot in self.plan.replicas:
            known = (each for each in reversed(self._records) if len(each.blocks) >= hot.blocks)
            alike = next((each for each in known if prefix_hash(each.blocks[hot.blocks - 1]) == hot.block_hash), None)
            if alike is None or not alike.root_tokens:
                continue
            for engine_id in hot.engines:
                with contextlib.suppress(EngineError):  # no room now: it does without
                    self.world.preload(engine_id, alike.root, min(alike.root_tokens, hot.blocks * BLOCK_TOKENS))


def engine_info(engine_id: str, profile: Profile) -> EngineInfo:
    """What such an engine says of itself."""
    return EngineInfo(
        engine_id=engine_id,
        url=f"http://{engine_id}",
        kind=profile.kind,
        model=profile.model,
        context_length_tokens=profile.context_length_tokens,
        kv_capacity_tokens=profile.kv_capacity_tokens,
        kv_layout=profile.kv_layout,
        transports=("tcp",),
        epoch="1",
    )


def arrival_batch(calls: Sequence[Call]) -> ArrivalBatch:
    """As the router would have written it."""
    return ArrivalBatch(
        router_id=ROUTER,
        request_ids=tuple(f"{ROUTER}-{call.row:x}" for call in calls),
        arrived_at_s=tuple(EPOCH_S + call.arrived_s for call in calls),
        prompt_tokens=tuple(call.prompt_tokens for call in calls),
        prompt_bytes=tuple(BYTES_PER_TOKEN * call.prompt_tokens for call in calls),
        slo_classes=tuple(call.slo_class for call in calls),
        plan_versions=tuple(call.plan.version for call in calls),
        prefix_hashes=tuple(prefix_hashes(call.blocks) or () for call in calls),
    )
