"""What `trimtab top` shows, computed: no drawing here, and no clock but the one passed in."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from controller.heartbeats import Heartbeats, RouterBeat
from controller.store.keys import Keys
from controller.store.protocol import Entry, Store
from engines.records import Outcome, RequestRecord
from engines.telemetry import Heartbeat
from tuner.plan import BadDocument, Plan, parse
from tuner.slo import BOOTSTRAP_SLOS, SloTable

READ_COUNT = 5000
NOT_OURS = frozenset({Outcome.REJECTED, Outcome.CLIENT_LEFT})
"""Outcomes that say nothing about how well the fleet served: the request was wrong, or nobody waited for the answer."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; `None` when there was nothing to measure."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ClassView:
    """One SLO class over the window."""

    name: str
    finished: int
    good: int
    target: float
    ttft_bound_s: float
    tpot_bound_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles

    @property
    def attainment(self) -> float | None:
        """Share that met both bounds; `None` without requests."""
        return self.good / self.finished if self.finished else None


@dataclass(frozen=True, slots=True)
class View:
    """One moment of `trimtab top`. Rates are a second, over the window."""

    model: str
    window_s: float
    offered_rate: float
    goodput: float
    inflight: int
    classes: Sequence[ClassView]
    outcomes: Mapping[str, int]
    patterns: Mapping[str, int]
    """Requests by pattern and plan version, e.g. `balanced v7`."""
    plan: Plan | None
    engines: Sequence[Heartbeat]
    routers: Sequence[RouterBeat]

    @property
    def why_empty(self) -> str | None:
        """Why there are no figures; `None` when there are."""
        if sum(self.outcomes.values()):
            return None
        if not self.routers:
            return f"No router of model {self.model!r} is alive: start one with `trimtab up` or `trimtab router`."
        if not self.engines:
            return "No engine is alive, so nothing can be served: start one with `trimtab engine emulated`."
        if self.inflight:
            return f"No request has finished in the last {self.window_s:g} s; {self.inflight} are under way."
        return f"No request in the last {self.window_s:g} s: send one to {self.routers[0].url}/v1."


def finished_at_s(record: RequestRecord) -> float:
    return record.arrived_at_s + record.e2e_s


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` of all are no larger than."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def percentiles(values: Iterable[float | None]) -> Percentiles:
    measured = [value for value in values if value is not None]
    return Percentiles(percentile(measured, 0.5), percentile(measured, 0.95), percentile(measured, 0.99))


def summarize(
    model: str,
    records: Sequence[RequestRecord],
    slos: SloTable,
    plan: Plan | None,
    engines: Sequence[Heartbeat],
    routers: Sequence[RouterBeat],
    window_s: float,
) -> View:
    """Figures over records that finished within the window.

    Demand is what finished or is still in flight: under overload the second part is what grows.
    """
    served = [record for record in records if record.outcome not in NOT_OURS]
    by_class = [class_view(name, served, slos) for name in sorted(slos.classes)]
    inflight = sum(router.inflight for router in routers)
    return View(
        model=model,
        window_s=window_s,
        offered_rate=(len(served) + inflight) / window_s,
        goodput=sum(view.good for view in by_class) / window_s,
        inflight=inflight,
        classes=by_class,
        outcomes=Counter(record.outcome.value for record in records),
        patterns=Counter(f"{record.pattern} v{record.plan_version}" for record in records),
        plan=plan,
        engines=engines,
        routers=routers,
    )


def class_view(name: str, served: Sequence[RequestRecord], slos: SloTable) -> ClassView:
    slo = slos.classes[name]
    mine = [record for record in served if slos.resolve(record.slo_class) == name]
    answered = [record for record in mine if record.outcome is Outcome.OK]
    return ClassView(
        name=name,
        finished=len(mine),
        good=sum(slo.met(record.ttft_s, record.tpot_s) for record in answered),
        target=slo.attainment,
        ttft_bound_s=slo.ttft_ms / 1e3,
        tpot_bound_s=slo.tpot_ms / 1e3,
        ttft_s=percentiles(record.ttft_s for record in answered),
        tpot_s=percentiles(record.tpot_s for record in answered),
    )


class RecordWindow:
    """The request records of the last `window_s` seconds, read on from where the last reading ended."""

    def __init__(self, store: Store, stream: str, window_s: float) -> None:
        self.window_s = window_s
        self._store = store
        self._stream = stream
        self._position: str | None = None
        self._records: dict[str, RequestRecord] = {}
        """By request id: a router that lost the answer to a write sends the records again."""

    async def read(self, now_s: float) -> Sequence[RequestRecord]:
        """Records that finished after `now_s - window_s`."""
        for entry in await self._new_entries():
            self._position = entry.id
            self._take(entry)
        oldest_s = now_s - self.window_s
        self._records = {key: kept for key, kept in self._records.items() if finished_at_s(kept) >= oldest_s}
        return list(self._records.values())

    async def _new_entries(self) -> Sequence[Entry]:
        if self._position is None:
            return await self._store.latest(self._stream, READ_COUNT)
        return await self._store.read(self._stream, self._position, READ_COUNT)

    def _take(self, entry: Entry) -> None:
        try:
            record = msgspec.json.decode(entry.value, type=RequestRecord)
        except msgspec.DecodeError:
            return  # a router of another version; its heartbeat says so
        self._records[record.request_id] = record


class Observer:
    """Reads the store and makes views. Raises `StoreUnavailable` when it does not answer."""

    def __init__(self, store: Store, model: str, window_s: float) -> None:
        keys = Keys(model)
        self._store = store
        self._model = model
        self._keys = keys
        self._heartbeats = Heartbeats(store, keys)
        self._window = RecordWindow(store, keys.requests, window_s)

    async def view(self, now_s: float) -> View:
        return summarize(
            self._model,
            await self._window.read(now_s),
            await self._slos(),
            await self._plan(),
            tuple((await self._heartbeats.engines()).values()),
            tuple((await self._heartbeats.routers()).values()),
            self._window.window_s,
        )

    async def _plan(self) -> Plan | None:
        found = await self._store.get(self._keys.plan)
        try:
            return None if found is None else parse(Plan, found.value)
        except BadDocument:
            return None

    async def _slos(self) -> SloTable:
        found = await self._store.get(self._keys.slo)
        try:
            return BOOTSTRAP_SLOS if found is None else parse(SloTable, found.value)
        except BadDocument:
            return BOOTSTRAP_SLOS
