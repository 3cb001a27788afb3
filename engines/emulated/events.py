"""What a kernel reports: the pass it wants to run, and what came out of it. Plain data, times in seconds."""

import msgspec

from engines.types import EngineTimings


class Pass(msgspec.Struct, frozen=True, gc=False):
    """One forward pass that is about to run."""

    duration_s: float
    prefill_tokens: int
    prefill_context_tokens: int
    """Sum over the pass's prefills of new tokens × mean tokens each of them attends to."""
    decode_batch: int
    kv_tokens: int
    """Tokens attended to by the decodes of this pass."""
    queued: int
    """Prompts that wait for this pass: not admitted once it has taken its own, or begun and none of its business."""


class Token(msgspec.Struct, frozen=True, gc=False):
    """A generation produced its next output token."""

    request_id: str
    token: int
    at_s: float


class Prefilled(msgspec.Struct, frozen=True, gc=False):
    """The KV of a `submit_prefill` is in the cache, pinned until `release_prefill`."""

    request_id: str
    cached_tokens: int
    """How much of it was in the cache before."""
    queue_s: float
    """From submission until its first pass began."""
    prefill_s: float
    """From submission until now; `queue_s` is part of it, as in `RemoteSendAnswer`."""
    at_s: float


class Finished(msgspec.Struct, frozen=True):
    """A generation reached `max_tokens`. Comes right after its last `Token`; its KV is given up already."""

    request_id: str
    timings: EngineTimings


Event = Token | Prefilled | Finished
