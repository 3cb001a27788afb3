"""What engines and routers report: arrivals, one record a finished request, samples of forward passes.

They go as JSON into the Redis streams `arrivals`, `requests`, `passes` and `transfers` (see `docs/architecture.md`).
Times are seconds; `None` means that there was nothing to measure.
"""

import enum

import msgspec


class Outcome(enum.StrEnum):
    """How a request ended, from the client's side. Only `OK` can count as goodput."""

    OK = "ok"
    CLIENT_LEFT = "client_left"
    """Before it could be told whether the fleet keeps its promise."""
    GAVE_UP = "gave_up"
    """The client left too, but its TTFT bound was broken by then."""
    REJECTED = "rejected"
    """The request itself was wrong (4xx)."""
    SHED = "shed"
    """Refused by admission because it could not have met its SLO."""
    NO_ROOM = "no_room"
    """Refused with 429: no KV room and the router's queue was full or the wait too long."""
    TIMEOUT = "timeout"
    FAILED = "failed"


class ArrivalBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that one router has just taken on: columns of one length, in order of arrival.

    A request that the router could not make sense of has no arrival. Each that has one gets a `RequestRecord` with the
    same `request_id` once it ends. A batch may be delivered twice.
    """

    router_id: str
    request_ids: tuple[str, ...]
    arrived_at_s: tuple[float, ...]
    """Unix time."""
    prompt_tokens: tuple[int, ...]
    """The router's estimate at arrival; the record has the true count."""
    prompt_bytes: tuple[int, ...]
    """Length of the JSON that `prefix_hashes` are made of."""
    slo_classes: tuple[str, ...]
    plan_versions: tuple[int, ...]
    """The plan that each request runs under."""
    prefix_hashes: tuple[tuple[int, ...], ...]
    """As in `RequestRecord`; empty for a prompt of less than one block."""


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
    transfer_retries: int = 0
    """Of those that failed, how many were tried once more."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """`None` for fewer than two output tokens; then the bound counts as met."""
    e2e_s: float
    queue_s: float | None = None
    """Waiting in the router and for the schedulers of all engines that worked on it; no part of `prefill_s`."""
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
    """Prompts that waited for it: still in the queue, or begun and none of its business."""


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One KV transfer: what it added to its request, from when all was computed until the receiver could use it."""

    engine_id: str
    """Of the engine that timed it: an emulated one receives, an SGLang engine sends."""
    kind: str
    at_s: float
    wall_s: float
    """With the wait for the reservation, where an engine makes callers wait for that."""
    bytes: int
    concurrent: int
