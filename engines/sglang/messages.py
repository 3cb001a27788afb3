"""What the HTTP process and the scheduler process of one engine say to each other.

A `Call` is answered by one `Answer` with its `call_id`; calls are concurrent. `Event`s come unasked. Prompts travel as
bytes of 32-bit token ids. SGLang's own messages carry these as bytes (see `internals`).
"""

from array import array
from collections.abc import Sequence

import msgspec

from engines.errors import EngineError, from_answer
from engines.records import PassRecord
from engines.sglang.wire import KvAddress, Peer
from engines.types import EngineLoad

RID_PREFIX = "tt-"
"""Generations of this plugin are named so; a serial number follows, as SGLang aborts by prefix."""


def pack_tokens(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpack_tokens(packed: bytes) -> Sequence[int]:
    found = array("i")
    found.frombytes(packed)
    return found


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Call(Message, frozen=True, kw_only=True):
    call_id: int


class Describe(Call, frozen=True, kw_only=True):
    """Answered by `Description`."""


class Reserve(Call, frozen=True, kw_only=True):
    """Answered by `Reserved`."""

    request_id: str
    prompt: bytes
    end: int
    ttl_s: float
    trace_id: str | None = None
    """For logs."""


class Release(Call, frozen=True, kw_only=True):
    """Give up the reservation of a request, if there is one. Answered by `Done`."""

    request_id: str


class Claim(Call, frozen=True, kw_only=True):
    """The generation of a request begins: keep what was received, give up room that is still empty."""

    request_id: str


class Replay(Call, frozen=True, kw_only=True):
    """The prompt of `rid` ends with `tokens` of an answer: a grammar that the answer obeys must see them first."""

    rid: str
    tokens: bytes


class AddPeer(Call, frozen=True, kw_only=True):
    peer: Peer


class Send(Call, frozen=True, kw_only=True):
    """Write the KV of `prompt[begin:end]`, which the generation `rid` computes. Answered by `Sent` at the very end."""

    rid: str
    prompt: bytes
    address: KvAddress


class AskHeld(Call, frozen=True, kw_only=True):
    """Has all KV of this reservation arrived? `Done` if it has."""

    request_id: str
    nonce: str


class StopSend(Call, frozen=True, kw_only=True):
    """The send of `rid` is not wanted any more; its own call is then answered by `Failed`."""

    rid: str
    status: int
    code: str
    message: str


class AskLoad(Call, frozen=True, kw_only=True):
    """Answered by `LoadReport`."""


class SetKnobs(Call, frozen=True, kw_only=True):
    """Answered by `LoadReport`."""

    chunked_prefill_tokens: int | None = None
    prefill_decode_interval: int | None = None


class SetDraining(Call, frozen=True, kw_only=True):
    on: bool


class Answer(Message, frozen=True, kw_only=True):
    call_id: int


class Done(Answer, frozen=True, kw_only=True):
    pass


class Failed(Answer, frozen=True, kw_only=True):
    status: int
    code: str
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, call_id: int, error: EngineError) -> "Failed":
        return cls(
            call_id=call_id,
            status=error.status,
            code=error.code,
            message=error.message,
            retry_after_s=error.retry_after_s,
        )

    def error(self) -> EngineError:
        return from_answer(self.status, self.code, self.message, self.retry_after_s)


class Description(Answer, frozen=True, kw_only=True):
    engine_id: str
    peer: Peer
    kv_capacity_tokens: int
    context_length_tokens: int
    vocab_size: int
    device: str
    transports: tuple[str, ...]


class Reserved(Answer, frozen=True, kw_only=True):
    address: KvAddress
    """Without its URL, which only the HTTP process knows."""
    prefix_matched_length: int


class SendReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the send of one prompt's KV went."""

    cached_tokens: int
    bytes: int
    queue_s: float
    prefill_s: float
    """`queue_s` is part of it."""
    transfer_s: float
    sharing: int = 1
    """Transfers that were being written when this one was, itself included."""


class Sent(Answer, frozen=True, kw_only=True):
    report: SendReport


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler process has counted since its start, named as in `engines.metrics.Counters`."""

    passes: int = 0
    busy_prefill_s: float = 0.0
    busy_decode_s: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    expired_reservations: int = 0
    transfers: dict[str, int] = {}
    """Inbound transfers by outcome: `ok`, or the code of the error."""


class LoadReport(Answer, frozen=True, kw_only=True):
    load: EngineLoad
    totals: Totals


class Event(Message, frozen=True, kw_only=True):
    pass


class Prefilled(Event, frozen=True, kw_only=True):
    """A generation has its first token."""

    rid: str
    queue_s: float
    prefill_s: float


class AllWritten(Event, frozen=True, kw_only=True):
    """The send of `rid` has written everything, and the note that says so; its receiver has not answered yet."""

    rid: str
    with_checksums: bool
    """Whether the receiver still has to check the bytes. Without, there is nothing left that it could find wrong."""
    report: SendReport
    """Until now."""
    computed_s: float
    """When everything was computed, on the machine's monotonic clock."""


class Sampled(Event, frozen=True, kw_only=True):
    """Forward passes since the last such event."""

    passes: list[PassRecord]
    load: EngineLoad
    totals: Totals


AnyCall = (
    Describe
    | Reserve
    | Release
    | Claim
    | Replay
    | AddPeer
    | Send
    | AskHeld
    | StopSend
    | AskLoad
    | SetKnobs
    | SetDraining
)
AnyReport = Done | Failed | Description | Reserved | Sent | LoadReport | Prefilled | AllWritten | Sampled
_encoder = msgspec.msgpack.Encoder()
_call_decoder = msgspec.msgpack.Decoder(AnyCall)
_report_decoder = msgspec.msgpack.Decoder(AnyReport)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_call(raw: bytes) -> AnyCall:
    return _call_decoder.decode(raw)


def decode_report(raw: bytes) -> AnyReport:
    return _report_decoder.decode(raw)
