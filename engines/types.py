"""The nouns of an engine. Read this first.

An *engine* is one process (or tensor-parallel group) that serves one model replica. Every engine can prefill
and decode; what the current plan uses it for is its role, and a role is never a start-up flag.

Everything here is immutable data that crosses process boundaries as JSON, so these are `msgspec.Struct`s:
they validate on decode and cost nothing heavier than what SGLang itself already imports.
"""

import enum

import msgspec

PROTOCOL_VERSION = 1


class Role(enum.StrEnum):
    """What the plan in force uses an engine for."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a KV cache. Two engines exchange KV only if their layouts are equal."""

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_size_tokens: int = 1
    tensor_parallel: int = 1

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all layers: `2 · layers · kv_heads · head_dim · bytes`."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while an engine process lives. Answer of `GET /microserving/info`."""

    engine_id: str
    url: str
    kind: str
    """Which latency model applies: hardware, model and serving stack, e.g. `h100-tp4-llama-3.1-70b`."""
    model: str
    context_length_tokens: int
    kv_capacity_tokens: int
    kv_layout: KvLayout
    transports: tuple[str, ...]
    epoch: str
    """Changes with every start of the process, so that stale KV addresses are recognised."""
    protocol_version: int = PROTOCOL_VERSION


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine's load. Answer of `GET /microserving/load`.

    Snapshots go stale behind a long prefill; a router's own count of its work in flight comes first.
    """

    running: int = 0
    queued: int = 0
    pending_prefill_tokens: int = 0
    kv_used_tokens: int = 0
    """Held by running requests or pinned; excludes reservations and what could be evicted."""
    kv_reserved_tokens: int = 0
    kv_capacity_tokens: int = 0
    inbound_transfers: int = 0
    draining: bool = False
    chunked_prefill_tokens: int | None = None
    prefill_decode_interval: int | None = None
    prefill_tokens_per_s: float | None = None
    """How fast waiting prompts are computed, see `PrefillRate`; `None` until it was measured."""

    @property
    def kv_free_tokens(self) -> int:
        return max(0, self.kv_capacity_tokens - self.kv_used_tokens - self.kv_reserved_tokens)


class EngineTimings(msgspec.Struct, frozen=True, kw_only=True):
    """How one generation went, as the engine saw it. Ends every `start_generate` answer."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    tokens_agree: bool | None = None
    """Whether the caller's token ids equalled the engine's own; `None` when the caller sent none."""
