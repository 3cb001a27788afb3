"""What a tick knows: the store's streams read on from where the last tick was, heartbeats, models fitted to both."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from controller.controller_metrics import ModelQuality, Seen
from controller.heartbeats import Heartbeats
from controller.store.keys import Keys
from controller.store.protocol import Store
from controller.streams import StreamReader
from engines.records import ArrivalBatch, PassRecord, RequestRecord, TransferRecord
from engines.telemetry import Heartbeat
from tuner.hot_prefixes import LOOKED_BACK_S
from tuner.plan import Plan
from tuner.slo import SloTable
from tuner.types import EngineState, Observation

if TYPE_CHECKING:
    from tuner.latency import LatencyModels
    from tuner.observe import Window


class Observer:
    """Every controller observes, leader or not, so that a new leader knows the traffic already.

    `new_models` makes them from what `learnt` gave, or from nothing. `span_s`: how much traffic an observation holds at
    most.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        window: "Window",
        new_models: "Callable[[bytes | None], LatencyModels]",
        span_s: float,
    ) -> None:
        self._heartbeats = Heartbeats(store, keys)
        self._arrivals = StreamReader(store, keys.arrivals, ArrivalBatch)
        self._requests = StreamReader(store, keys.requests, RequestRecord)
        self._passes = StreamReader(store, keys.passes, PassRecord)
        self._transfers = StreamReader(store, keys.transfers, TransferRecord)
        self._window = window
        self._new_models = new_models
        self._models = new_models(None)
        self._span_s = span_s
        self._beats: Mapping[str, Heartbeat] = {}
        self._newest_s: dict[str, float] = {}

    def restore(self, learnt: bytes | None) -> None:
        """Begin with the models of an earlier leader, as far as they are of use."""
        self._models = self._new_models(learnt)

    async def catch_up(self, now_s: float) -> None:
        """Take in everything that is new; raises `StoreUnavailable`, and the next call goes on from there.

        `now_s`: Unix time, by which what is late or absurd is told.
        """
        self._beats = await self._heartbeats.engines()
        self._window.engines_seen({engine_id: beat.info.epoch for engine_id, beat in self._beats.items()}, now_s)
        # Arrivals first: a request that is finished has arrived.
        async for batches in self._arrivals.news():
            self._window.add_arrivals(batches, now_s)
            self._note("arrivals", [at_s for batch in batches[-1:] for at_s in batch.arrived_at_s[-1:]])
        async for requests in self._requests.news():
            self._window.add_requests(requests, now_s)
            self._note("requests", [record.arrived_at_s + record.e2e_s for record in requests[-1:]])
        async for passes in self._passes.news():
            self._models.add_passes(passes)
            self._note("passes", [record.at_s for record in passes[-1:]])
        async for transfers in self._transfers.news():
            self._models.add_transfers(transfers)
            self._note("transfers", [record.at_s for record in transfers[-1:]])

    def observe(self, now_s: float, plan: Plan, slos: SloTable, since_s: Callable[[Plan], float]) -> Observation:
        """Fit the latency models and say what is known now. Takes long, and must not run beside another call.

        `since_s`: from which arrival on requests show what the plan in force does.
        """
        self._models.refit()
        return Observation(
            now_s=now_s,
            engines=[self._engine(beat) for beat in self._beats.values()],
            slos=slos,
            plan=plan,
            workload=self._window.workload(now_s, self._span_s),
            measured=self._window.measured(now_s, slos, plan.version, since_s(plan)),
            hot=self._window.hot_contexts(now_s, LOOKED_BACK_S, len(self._beats)),
        )

    def learnt(self) -> bytes:
        """The fitted models, for a controller that starts with none."""
        return self._models.state()

    def seen(self) -> Seen:
        """For metrics."""
        readers = self._readers()
        refused = {("requests", flaw.value): count for flaw, count in self._window.quality.items()}
        refused |= {("passes", why): count for why, count in self._models.refused.items()}
        malformed = {(name, "malformed"): reader.malformed for name, reader in readers.items()}
        kinds = [beat.info.kind for beat in self._beats.values()]
        return Seen(
            read={name: reader.read for name, reader in readers.items()},
            refused=refused | malformed,
            newest_s=dict(self._newest_s),
            engines={kind: kinds.count(kind) for kind in sorted(set(kinds))},
            models=self._quality(),
        )

    def _engine(self, beat: Heartbeat) -> EngineState:
        profile = self._models.profile_for(beat.info.kind, beat.info, beat.load)
        return EngineState(beat.info.engine_id, beat.info.kind, profile, beat.load.draining)

    def _quality(self) -> list[ModelQuality]:
        return [
            ModelQuality(kind, latency.value, error.p50 if error.checked else None, error.samples)
            for (kind, latency), error in self._models.errors().items()
        ]

    def _readers(self) -> Mapping[str, StreamReader[Any]]:
        return {
            "arrivals": self._arrivals,
            "requests": self._requests,
            "passes": self._passes,
            "transfers": self._transfers,
        }

    def _note(self, stream: str, made_at_s: list[float]) -> None:
        if made_at_s:
            self._newest_s[stream] = max(made_at_s[-1], self._newest_s.get(stream, 0.0))
