"""One request on its way through the reference simulator."""

from array import array
from dataclasses import dataclass, field

from engines.records import Outcome
from engines.types import EngineTimings
from tuner.placement import Placement, PlacementRequest
from tuner.plan import Plan
from tuner.prefix import PrefixIndex
from tuner.slo import Slo
from tuner.twin.records import SimulatedRecord
from tuner.twin.reference_engine import Hold, ReferenceEngine

NOWHERE = Placement(())


@dataclass(slots=True, eq=False)
class Call:
    """What the router keeps of a request, and what it has measured of it so far."""

    row: int
    request_id: str
    slo_class: str
    slo: Slo
    arrived_s: float
    prompt: "array[int]"
    output_tokens: int
    session: int
    root: int
    root_tokens: int
    blocks: list[int]
    plan: Plan
    turn: int
    placement: Placement = NOWHERE
    holds: list[Hold] = field(default_factory=list)
    waits_since_s: float | None = None
    """Since when it is in the router's queue."""
    waited: bool = False
    """It was in the queue before for what it wants now, and keeps its place at the front."""
    reserving: bool = False
    """It passed admission and wants room on a decode engine."""
    done: bool = False
    end: int = 0
    """Where its prompt is split; 0 for no split."""
    begin: int = 0
    decode: ReferenceEngine | None = None
    prefill: ReferenceEngine | None = None
    generation: Hold | None = None
    first_s: float | None = None
    sent_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float | None = None
    sent_bytes: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def is_split(self) -> bool:
        return self.end > 0

    def placement_request(self, index: PrefixIndex, tokens_per_block: int) -> PlacementRequest:
        hints = index.match(self.blocks) if self.blocks else {}
        return PlacementRequest(len(self.prompt), {key: n * tokens_per_block for key, n in hints.items()})

    def hold(self, engine: ReferenceEngine, prefill_tokens: int) -> Hold:
        held = Hold(engine, prefill_tokens)
        self.holds.append(held)
        return held

    def record(self, outcome: Outcome, timings: EngineTimings | None, now_s: float) -> SimulatedRecord:
        ttft_s = None if self.first_s is None else self.first_s - self.arrived_s
        tpot_s = None
        if self.first_s is not None and self.output_tokens > 1:
            tpot_s = (now_s - self.first_s) / (self.output_tokens - 1)
        split = self.sent_bytes is not None
        return SimulatedRecord(
            row=self.row,
            slo_class=self.slo_class,
            arrived_s=self.arrived_s,
            ended_s=now_s,
            outcome=outcome,
            pattern=self.plan.pattern,
            plan_version=self.plan.version,
            prompt_tokens=len(self.prompt),
            output_tokens=self.output_tokens,
            session=self.session,
            root=self.root,
            root_tokens=self.root_tokens,
            blocks=self.blocks,
            prefill_engine=self.prefill.engine_id if split and self.prefill else None,
            decode_engine=self.decode.engine_id if self.decode else None,
            cached_tokens=timings.cached_tokens if timings else None,
            split_begin=self.begin if self.is_split else None,
            split_end=self.end if self.is_split else None,
            transferred_bytes=self.sent_bytes,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            queue_s=self.queue_s + (timings.queue_s if timings else 0.0),
            prefill_s=self.prefill_s + (timings.prefill_s if timings else 0.0),
            transfer_s=self.transfer_s,
            decode_s=timings.decode_s if timings else None,
        )
