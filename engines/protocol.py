"""Wire models of the eight microserving verbs (JSON over HTTP, on every engine).

| verb | request | answer |
|---|---|---|
| `POST /microserving/prep_recv` | `PrepRecv` | `PrepRecvAnswer` |
| `POST /microserving/remote_send` | `RemoteSend` | `RemoteSendAnswer`, once the receiver holds the KV |
| `POST /microserving/start_generate` | `StartGenerate` | the engine's own OpenAI answer, plain or SSE |
| `POST /microserving/abort` | `Abort` | `{}`; idempotent |
| `GET /microserving/info` | | `EngineInfo` |
| `GET /microserving/load` | | `EngineLoad` |
| `POST /microserving/config` | `Config` | `Config` with the values now in force |
| `POST /microserving/drain` | `Drain` | `{"draining": bool}` |

`POST /tokenize` (`Tokenize` -> `Tokens`) lets a router without a tokenizer count tokens through the engine.

Errors are `{"error": {"code", "message"}}` with a 4xx or 5xx status; codes are in `engines.errors`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

TIMINGS_HEADER = "x-trimtab-timings"
"""Response header of a plain `start_generate`: `EngineTimings` as JSON."""

TIMINGS_COMMENT = b": trimtab "
"""Prefix of the SSE comment that carries `EngineTimings` as JSON at the end of a streamed `start_generate`.

It stands just before `data: [DONE]` (or at the end of a stream without one), as an event of its own. SSE clients
ignore comments, so an engine that is called directly stays OpenAI-compatible; a router strips it.
"""


class PrepRecv(msgspec.Struct, frozen=True, kw_only=True):
    """Match `prompt[:end]`, pin the match and reserve room for the rest, or answer 429 at once.

    `end` counts from the back when negative, as in Python; then `0 < end < len(prompt)` must hold.
    """

    request_id: str
    prompt: list[int]
    end: int
    ttl_s: float


class PrepRecvAnswer(msgspec.Struct, frozen=True, kw_only=True):
    kv_addr_info: str
    """Opaque; hand it to `remote_send` as it is."""
    prefix_matched_length: int
    """Tokens of `prompt[:end]` the receiver already holds: the `begin` for `remote_send`."""


class RemoteSend(msgspec.Struct, frozen=True, kw_only=True):
    """Compute the KV of `prompt[begin:end]` and write it into the reservation behind `kv_addr_info`."""

    request_id: str
    prompt: list[int]
    kv_addr_info: str
    begin: int
    end: int


class RemoteSendAnswer(msgspec.Struct, frozen=True, kw_only=True):
    cached_length: int
    """Tokens of `prompt[:end]` that the sender took from its own context cache."""
    bytes: int
    prefill_s: float
    """From the arrival of the call to the last token's KV being there, queueing included."""
    transfer_s: float
    """From then until the receiver confirmed that it holds the KV."""
    queue_s: float = 0.0
    """The part of `prefill_s` spent waiting for the scheduler."""


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What the client already has of one choice of a stream that broke off on another engine."""

    index: int
    text: str
    tokens: int
    finish_reason: str | None = None
    """Set if this choice had ended: it is then not generated again, but counts in `usage`."""


class StartGenerate(msgspec.Struct, frozen=True, kw_only=True):
    """Serve `body` as the engine's own endpoint would, on whatever KV is there, prefilling the rest.

    `body` travels as the client sent it. `prompt` (the router's token ids) only lets the engine check that both
    sides tokenized alike; it may be absent. With `resume`, the answer continues after what was already
    delivered: no text is repeated, no role delta is sent again, and `usage` counts the delivered tokens as output.
    Chunk ids are `cmpl-{request_id}` or `chatcmpl-{request_id}`, so that they survive a change of engines.
    """

    request_id: str
    api: Literal["completions", "chat"]
    body: msgspec.Raw
    prompt: list[int] | None = None
    begin: int = 0
    resume: list[ResumedChoice] | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str


class Config(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Live scheduler knobs. An absent knob stays as it is."""

    chunked_prefill_tokens: int | None = None
    """Most prompt tokens in one forward pass; at least 16."""
    prefill_decode_interval: int | None = None
    """Decode passes between two prefill passes while requests decode; 0 runs prefills back to back."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    on: bool


class Tokenize(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `prompt` and `messages`; the other fields are those that a chat template may read.

    A caller may splice them in as `msgspec.Raw`; decoding gives plain objects (msgspec decodes no optional `Raw`).
    """

    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Sequence[int]
    count: int
