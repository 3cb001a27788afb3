"""What the reference simulator tells of a request that ended."""

from dataclasses import dataclass

from engines.records import Outcome, RequestRecord
from tuner.twin.prompts import prefix_hashes

STATUSES = {Outcome.OK: 200, Outcome.REJECTED: 400, Outcome.FAILED: 503}
REFUSED = 429


@dataclass(slots=True)
class SimulatedRecord:
    """One request, from its arrival to its end. Times in simulated seconds, `None` where there is nothing to tell."""

    row: int
    """Its place in the order in which requests were offered."""
    slo_class: str
    arrived_s: float
    ended_s: float
    outcome: Outcome
    pattern: str
    plan_version: int
    prompt_tokens: int
    output_tokens: int
    """Asked for; what it got as well if `outcome` is OK."""
    session: int
    root: int
    root_tokens: int
    blocks: list[int]
    prefill_engine: str | None = None
    decode_engine: str | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt whose KV the decode engine had when it began: its own, and what was sent to it."""
    split_begin: int | None = None
    split_end: int | None = None
    transferred_bytes: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    queue_s: float = 0.0
    """In the router and in engines, before any prefill."""
    prefill_s: float = 0.0
    transfer_s: float | None = None
    decode_s: float | None = None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.arrived_s

    def request_record(self, epoch_s: float, router_id: str = "simulated") -> RequestRecord:
        """As a router would have written it; `epoch_s` is the Unix time at which simulated time began."""
        served = self.outcome is Outcome.OK
        return RequestRecord(
            request_id=f"{router_id}-{self.row:x}",
            router_id=router_id,
            slo_class=self.slo_class,
            arrived_at_s=epoch_s + self.arrived_s,
            outcome=self.outcome,
            status=STATUSES.get(self.outcome, REFUSED),
            api="completions",
            stream=True,
            pattern=self.pattern,
            plan_version=self.plan_version,
            prefill_engine=self.prefill_engine,
            decode_engine=self.decode_engine,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens if served else None,
            split_begin=self.split_begin,
            split_end=self.split_end,
            transferred_bytes=self.transferred_bytes,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            e2e_s=self.e2e_s,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s if served else None,
            transfer_s=self.transfer_s,
            decode_s=self.decode_s,
            prefix_hashes=prefix_hashes(self.blocks),
        )
