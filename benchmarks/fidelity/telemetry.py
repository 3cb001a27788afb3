"""What engines reported of a span of time, as a fleet of the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from controller.heartbeats import Heartbeats
from controller.store import Keys, Store
from controller.streams import StreamReader
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


async def served_stages(store: Store, model: str, span: Span) -> Stages:
    """Mean seconds of each stage of what the router served, of requests that arrived in `span`."""
    found = [
        record
        async for page in StreamReader(store, Keys(model).requests, RequestRecord).news()
        for record in page
        if record.outcome is Outcome.OK and span.holds(record.arrived_at_s)
    ]
    return {stage: _mean([getattr(record, stage) or 0.0 for record in found]) for stage in STAGES}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


async def _of_span(reader: StreamReader[Record], span: Span) -> Sequence[Record]:
    return [record async for page in reader.news() for record in page if span.holds(record.at_s)]
