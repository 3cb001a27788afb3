"""The reference simulator: the emulated engine's kernel and link in virtual time, behind the router's own placement.

It is as true as this repository can be without processes, and slow. The fast twin is held to it; benchmarks use it as
the world in which the tuner is judged.
"""

import math
from collections import deque
from itertools import count

import numpy as np

from engines.emulated.events import Event, Finished, Prefilled, Token
from engines.protocol import Config
from engines.records import Outcome
from tuner.plan import Plan
from tuner.slo import SloTable
from tuner.twin.events import Events
from tuner.twin.limits import POLL_S, RESERVATION_TTL_S
from tuner.twin.prompts import Streams
from tuner.twin.records import SimulatedRecord
from tuner.twin.reference_call import Call
from tuner.twin.reference_engine import ReferenceEngine, Samples
from tuner.twin.reference_router import ReferenceRouter
from tuner.twin.types import Ending, Fleet, Timeline
from tuner.workload import Workload

NOBODY = -1
"""The session of prompts that no client sent."""

ENDINGS = {Outcome.OK: Ending.OK, Outcome.SHED: Ending.SHED}


class ReferenceFleet:
    """A fleet and its router that go on for as long as they are asked to. Time begins at 0.

    Give it requests with `offer`, let time pass with `advance`, change the plan in between. Requests keep the plan that
    was in force when they arrived; roles and engine knobs change at once. Raises `ValueError` for an empty fleet.
    """

    def __init__(self, fleet: Fleet, plan: Plan, slos: SloTable, *, keep_samples: bool = False) -> None:
        if not fleet:
            raise ValueError("a fleet needs at least one engine")
        self._events = Events()
        self._slos = slos
        self._plan = plan
        self._streams = Streams()
        self._rows = count()
        self._turns = count(1)
        self._coming: deque[tuple[float, Workload, int]] = deque()
        self._arrived: list[Call] = []
        self.engines = [ReferenceEngine(index, engine, plan) for index, engine in enumerate(fleet)]
        self._router = ReferenceRouter(self.engines, self._events, self._drive)
        if keep_samples:
            self._router.samples = Samples()
        self._apply_knobs()
        self._poll_next(0)

    @property
    def now_s(self) -> float:
        return self._events.now_s

    @property
    def open(self) -> int:
        """Requests that have arrived and not ended."""
        return self._router.open

    def offer(self, workload: Workload, at_s: float = 0.0) -> None:
        """Have these requests arrive, the workload's time beginning at `at_s`.

        Sessions and roots of all offers are the same ones if they have the same numbers. Raises `ValueError` if they
        begin before what was offered last, or in the past.
        """
        if not len(workload):
            return
        earliest_s = max(self.now_s, self._coming[-1][0] if self._coming else 0.0)
        if at_s + workload.arrived_s[0] < earliest_s:
            raise ValueError(f"requests from {at_s + workload.arrived_s[0]} s on come too late, it is {earliest_s} s")
        self._coming.extend(
            (at_s + arrived_s, workload, row) for row, arrived_s in enumerate(workload.arrived_s.tolist())
        )

    def set_plan(self, plan: Plan) -> None:
        self._plan = plan
        for engine in self.engines:
            engine.view.role = plan.role_of(engine.engine_id)
        self._apply_knobs()

    def plan_for_arrival(self) -> Plan:
        """What the request that arrives now will keep; a subclass may choose for each."""
        return self._plan

    def set_slos(self, slos: SloTable) -> None:
        self._slos = slos

    def set_available(self, engine_id: str, on: bool) -> None:
        """Give an engine no new work, or give it some again; what runs on it is finished. `KeyError` if unknown."""
        engine = {each.engine_id: each for each in self.engines}[engine_id]
        engine.available = engine.view.available = on

    def preload(self, engine_id: str, root: int, root_tokens: int) -> None:
        """Put a root into an engine's context cache, as a copy from another engine would, at once and at no cost.

        Raises `KeyError` for an unknown engine, `NoKvRoom` or `ContextTooLong` for what does not fit.
        """
        engine = {each.engine_id: each for each in self.engines}[engine_id]
        prompt = self._streams.prompt(NOBODY, root, root_tokens, root_tokens + 1)
        request_id = f"preload-{root}"
        begin = engine.kernel.reserve(request_id, prompt, root_tokens, RESERVATION_TTL_S, self.now_s).begin
        engine.kernel.receive(request_id, begin, root_tokens, self.now_s)
        engine.kernel.release(request_id, self.now_s)
        self._router.holds(self._streams.blocks(NOBODY, root, root_tokens, root_tokens), engine_id)

    def advance(self, until_s: float = math.inf) -> list[SimulatedRecord]:
        """Let time pass; the requests that ended. With no limit: until nothing is left to do."""
        events, router = self._events, self._router
        while self._coming or router.open or until_s < math.inf:
            event_s = events.next_s()
            at_s = math.inf if event_s is None else event_s
            if self._coming and self._coming[0][0] <= at_s:
                if self._coming[0][0] > until_s:
                    break
                self._arrive()
            elif at_s <= until_s:
                events.step()
            else:
                break
            router.settle()
        if until_s < math.inf:
            events.now_s = max(events.now_s, until_s)
        ended, router.ended = router.ended, []
        return ended

    def take_samples(self) -> Samples:
        """Passes and transfers since the last call; empty unless `keep_samples` was asked for."""
        taken = self._router.samples
        if taken is None:
            return Samples()
        self._router.samples = Samples()
        return taken

    def take_arrivals(self) -> list[Call]:
        """Requests that arrived since the last call, in order; empty unless `keep_samples` was asked for."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def check(self) -> None:
        """Raise `RuntimeError` if any engine's KV room is not accounted for."""
        for engine in self.engines:
            engine.kernel.check()

    def _apply_knobs(self) -> None:
        knobs = self._plan.knobs
        wanted = Config(
            chunked_prefill_tokens=knobs.chunked_prefill_tokens, prefill_decode_interval=knobs.prefill_decode_interval
        )
        for engine in self.engines:
            engine.kernel.config(wanted)

    def _arrive(self) -> None:
        self._events.now_s, workload, row = self._coming.popleft()
        call = self._call(workload, row)
        if self._router.samples is not None:
            self._arrived.append(call)
        self._router.arrive(call)

    def _call(self, workload: Workload, row: int) -> Call:
        session, root = int(workload.session[row]), int(workload.root[row])
        root_tokens, tokens = int(workload.root_tokens[row]), int(workload.prompt_tokens[row])
        slo_class = self._slos.resolve(workload.classes[workload.slo_class[row]])
        number = next(self._rows)
        return Call(
            row=number,
            request_id=str(number),
            slo_class=slo_class,
            slo=self._slos.classes[slo_class],
            arrived_s=self._events.now_s,
            prompt=self._streams.prompt(session, root, root_tokens, tokens),
            output_tokens=int(workload.output_tokens[row]),
            session=session,
            root=root,
            root_tokens=root_tokens,
            blocks=self._streams.blocks(session, root, root_tokens, tokens),
            plan=self.plan_for_arrival(),
            turn=next(self._turns),
        )

    def _poll_next(self, index: int) -> None:
        """The router asks one engine after the other for its load, each twice a second."""
        engine = self.engines[index]
        engine.expire(self.now_s)
        engine.poll()
        self._router.wake()
        self._drive(engine)
        following_s = self.now_s + POLL_S / len(self.engines)
        self._events.at(following_s, self._poll_next, (index + 1) % len(self.engines))

    def _drive(self, engine: ReferenceEngine) -> None:
        """Begin the engine's next pass unless one is under way."""
        if engine.current is not None:
            return
        now_s = self._events.now_s
        engine.expire(now_s)
        begun = engine.current = engine.kernel.begin_pass(now_s)
        if begun is not None:
            self._events.at(now_s + begun.duration_s, self._end_pass, engine)

    def _end_pass(self, engine: ReferenceEngine) -> None:
        """What came out reaches the router when the engine's next pass has begun."""
        now_s, ended = self._events.now_s, engine.current
        if ended is None:
            raise RuntimeError("no pass is under way")
        produced = engine.kernel.end_pass(now_s)
        engine.current = None
        self._drive(engine)
        engine.count(ended)
        if self._router.samples is not None:
            engine.sample(ended, now_s, self._router.samples)
        if ended.prefill_tokens or len(produced) > ended.decode_batch:
            self._tell(produced)

    def _tell(self, produced: list[Event]) -> None:
        router = self._router
        for event in produced:
            kind = type(event)
            if kind is Token:
                router.first_token(event.request_id)
            elif isinstance(event, Finished):
                router.finished(event)
            elif isinstance(event, Prefilled):
                router.prefilled(event)


def simulate_reference(workload: Workload, fleet: Fleet, plan: Plan, slos: SloTable) -> Timeline:
    """Run a whole workload; see `tuner.twin.types.Simulator`."""
    world = ReferenceFleet(fleet, plan, slos)
    world.offer(workload)
    records = world.advance()
    return timeline_of(records, world)


def timeline_of(records: list[SimulatedRecord], world: ReferenceFleet) -> Timeline:
    """Columns in the order in which the requests were offered; all of them must have ended."""
    ordered = sorted(records, key=lambda record: record.row)
    index = {engine.engine_id: engine.index for engine in world.engines}

    def floats(values: list[float | None]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    return Timeline(
        ending=np.array([ENDINGS.get(each.outcome, Ending.NO_ROOM) for each in ordered], dtype=np.int8),
        ttft_s=floats([each.ttft_s for each in ordered]),
        tpot_s=floats([each.tpot_s for each in ordered]),
        e2e_s=floats([each.e2e_s for each in ordered]),
        queue_s=floats([each.queue_s for each in ordered]),
        prefill_s=floats([each.prefill_s for each in ordered]),
        transfer_s=floats([each.transfer_s or 0.0 for each in ordered]),
        decode_s=floats([each.decode_s for each in ordered]),
        cached_tokens=np.array([each.cached_tokens or 0 for each in ordered], dtype=np.int64),
        decode_engine=np.array([index.get(each.decode_engine or "", -1) for each in ordered], dtype=np.int64),
        split=np.array([each.transferred_bytes is not None for each in ordered], dtype=np.bool_),
        busy_prefill_s=np.array([engine.busy_prefill_s for engine in world.engines]),
        busy_decode_s=np.array([engine.busy_decode_s for engine in world.engines]),
        makespan_s=max((each.ended_s for each in ordered), default=0.0),
    )
