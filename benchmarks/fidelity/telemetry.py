"""What engines reported of a span of time, as a fleet of the simulator."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from controller.heartbeats import Heartbeats
from controller.store import Keys, Store
from controller.streams import StreamReader
from engines.emulated.profile import Profile
from engines.records import Outcome, PassRecord, RequestRecord, TransferRecord
from tuner.latency import LatencyModels
from tuner.latency_prior import shipped_priors
from tuner.twin.types import Fleet, TwinEngine

STAGES = ("queue_s", "prefill_s", "transfer_s", "decode_s")
Stages = Mapping[str, float | None]
Record = TypeVar("Record", PassRecord, TransferRecord)


@dataclass(frozen=True, slots=True)
class Span:
    """Unix seconds."""

    begin_s: float
    end_s: float

    def holds(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s


async def fitted_fleet(store: Store, model: str, span: Span) -> Fleet:
    """The engines that live now, behaving as our latency models make of what they reported in `span` alone."""
    keys = Keys(model)
    models = LatencyModels(shipped_priors())
    beats = await Heartbeats(store, keys).engines()
    for beat in beats.values():
        models.profile_for(beat.info.kind, beat.info, beat.load)
    models.add_passes(await _of_span(StreamReader(store, keys.passes, PassRecord), span))
    models.add_transfers(await _of_span(StreamReader(store, keys.transfers, TransferRecord), span))
    models.refit()
    return [
        TwinEngine(engine_id, models.profile_for(beat.info.kind, beat.info, beat.load))
        for engine_id, beat in sorted(beats.items())
    ]


class Passes(NamedTuple):
    """Forward passes of one sort that an engine reported, beside what the fitted models make of the same work."""

    engine_id: str
    sort: str
    told: int
    real_s: float
    modelled_s: float


SORTS: Mapping[str, Callable[[PassRecord], bool]] = {
    "prefill": lambda record: record.prefill_tokens > 0,
    "decode": lambda record: not record.prefill_tokens,
}


async def told_passes(store: Store, model: str, span: Span, profile: Profile) -> Sequence[Passes]:
    """What was reported in `span`, by engine and sort; mean seconds of a pass."""
    records = await _of_span(StreamReader(store, Keys(model).passes, PassRecord), span)
    return [
        _passes(engine_id, sort, found, profile)
        for engine_id in sorted({record.engine_id for record in records})
        for sort, is_one in SORTS.items()
        if (found := [record for record in records if record.engine_id == engine_id and is_one(record)])
    ]


async def served_stages(store: Store, model: str, span: Span) -> Stages:
    """Mean seconds of each stage of what the router served, of requests that arrived in `span`."""
    found = [
        record
        async for page in StreamReader(store, Keys(model).requests, RequestRecord).news()
        for record in page
        if record.outcome is Outcome.OK and span.holds(record.arrived_at_s)
    ]
    return {stage: _mean([getattr(record, stage) or 0.0 for record in found]) for stage in STAGES}


def _passes(engine_id: str, sort: str, records: Sequence[PassRecord], profile: Profile) -> Passes:
    modelled_s = [
        profile.pass_s(each.prefill_tokens, each.prefill_context_tokens, each.decode_batch, each.kv_tokens)
        for each in records
    ]
    real_s = [each.wall_s for each in records]
    return Passes(engine_id, sort, len(records), float(np.mean(real_s)), float(np.mean(modelled_s)))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


async def _of_span(reader: StreamReader[Record], span: Span) -> Sequence[Record]:
    return [record async for page in reader.news() for record in page if span.holds(record.at_s)]
