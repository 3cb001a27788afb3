"""What engines and routers report: one record a finished request, and samples of forward passes.

Both go as JSON into the Redis streams `requests` and `passes` (see `docs/architecture.md`). Times are seconds; `None`
means that there was nothing to measure.
"""

import enum

import msgspec


class Outcome(enum.StrEnum):
    """How a request ended, from the client's side. Only `OK` can count as goodput."""

    OK = "ok"
    CLIENT_LEFT = "client_left"
    REJECTED = "rejected"
    """The request itself was wrong (4xx)."""
    SHED = "shed"
    """Refused by admission because it could not have met its SLO."""
    NO_ROOM = "no_room"
    """Refused with 429: no KV room and the router's queue was full or the wait too long."""
    TIMEOUT = "timeout"
    FAILED = "failed"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished request as the client saw it."""

    request_id: str
    router_id: str
    slo_class: str
    arrived_at_s: float
    """Unix time. Demand is counted at arrival."""
    outcome: Outcome
    status: int
    error_code: str | None = None
    api: str
    stream: bool
    pattern: str
    plan_version: int
    prefill_engine: str | None = None
    decode_engine: str | None = None
    attempts: int = 1
    resumed: int = 0
    """How often the stream was continued on another engine."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    split_begin: int | None = None
    split_end: int | None = None
    transferred_bytes: int | None = None
    transfer_failures: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    """`None` for fewer than two output tokens; then the bound counts as met."""
    e2e_s: float
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_s: float | None = None
    prefix_hashes: tuple[int, ...] | None = None
    """Hashes of the prompt's leading blocks, so that prefix sharing can be learnt without any prompt."""


class PassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled forward pass of an engine."""

    engine_id: str
    kind: str
    at_s: float
    """Unix time of the end of the pass."""
    wall_s: float
    prefill_tokens: int
    prefill_context_tokens: int
    """Sum over the pass's prefills of new tokens × mean tokens each of them attends to."""
    decode_batch: int
    kv_tokens: int
    """Tokens attended to by the decodes of this pass."""
    queued: int


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One inbound KV transfer, as its receiver saw it."""

    engine_id: str
    kind: str
    at_s: float
    wall_s: float
    bytes: int
    concurrent: int
