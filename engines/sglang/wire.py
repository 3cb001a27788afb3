"""What engines tell each other about transfers: addresses, peers, and the notes beside the bytes.

A transfer, S sending and R receiving:

1. S → R `Offer`, as soon as `remote_send` is called; R → S `Go`, `Held` (nothing is missing) or `Refused`.
2. S writes the slots of each chunk as it is computed, and starts no write later than `Go` allows.
3. S → R `Written`, behind the last byte; R checks, makes the KV visible and says `Held` or `Refused`.
4. Both schedulers may be in a pass by then and read their notes late. Nobody waits for that: `remote_send` answers once
   everything and the note are written, as R reads its notes before any call that comes later. Where R checks the bytes,
   S's HTTP process asks R's whether they were right (`kv_held`).

Either side may give up: R says `Refused` to a transfer under way, S then stops and says `Stopped`, and only after that
are the slots used for anything else. S gives up with `Stopped` by itself.
"""

import base64
import binascii

import msgspec
import xxhash

from engines.errors import BadRequest, EngineError, LayoutMismatch, from_answer
from engines.types import KvLayout

MAX_ADDRESS_CHARS = 1024 * 1024
Runs = list[tuple[int, int]]
"""Rows of the pool as (first, count), in order."""


class KvAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation, as its receiver wrote it down: the opaque `kv_addr_info`."""

    url: str
    """Where the receiver's agent metadata can be had."""
    agent: str
    epoch: str
    request_id: str
    nonce: str
    begin: int
    end: int
    """What the caller asked for."""
    stored_end: int
    """`end` at a page's edge: so far KV is moved."""
    layout: KvLayout
    rows: Runs
    """Pages reserved for `[begin, stored_end)`."""
    expires_at_s: float
    """Unix time."""
    reserve_s: float = 0.0
    """How long the reservation took: a receiver in a pass answers late."""

    def encode(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()


class KvHeld(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation whose sender asks whether everything has arrived."""

    request_id: str
    nonce: str


def decode_address(text: str) -> KvAddress:
    """Raises `BadRequest`."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise BadRequest(f"kv_addr_info of {len(text)} characters is not one that an engine gave out")
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=KvAddress)
    except (msgspec.DecodeError, binascii.Error, UnicodeError, ValueError) as error:
        raise BadRequest(f"kv_addr_info is not one that an engine gave out: {error}") from error


def check_layouts(mine: KvLayout, theirs: KvLayout) -> None:
    """Raises `LayoutMismatch` that names what differs."""
    names = [name for name in mine.__struct_fields__ if getattr(mine, name) != getattr(theirs, name)]
    if names:
        differing = ", ".join(f"{name} {getattr(mine, name)} here, {getattr(theirs, name)} there" for name in names)
        raise LayoutMismatch(f"the engines keep KV differently: {differing}")


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """One registered buffer of the KV pool: keys or values of one layer."""

    base: int
    """Address of its first byte in its owner's process."""
    row_bytes: int
    """Bytes of one page."""
    rows: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that can be written to, or that writes."""

    agent: str
    epoch: str
    metadata: bytes
    layout: KvLayout
    memory: str
    """`DRAM` or `VRAM`."""
    device_id: int
    buffers: tuple[Buffer, ...]


class Note(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what goes beside the bytes; `send_id` names the transfer on its sender."""

    send_id: str


class Offer(Note, frozen=True, kw_only=True):
    request_id: str
    nonce: str
    epoch: str
    begin: int
    end: int
    tokens_hash: int
    """Of the prompt up to `end`."""
    rows_hash: int
    """Of the rows that the sender was given: the address went through the caller's hands."""


class Go(Note, frozen=True, kw_only=True):
    write_for_s: float
    """Counted from the offer: writes may begin so long. The slots may be another's soon after."""


class Written(Note, frozen=True, kw_only=True):
    nonce: str
    tokens: int
    checksums: tuple[tuple[int, int], ...] | None = None
    """For each write its tokens and the hash of its bytes, in order; `None` if they are not checked."""


class Stopped(Note, frozen=True, kw_only=True):
    nonce: str


class Held(Note, frozen=True, kw_only=True):
    pass


class Refused(Note, frozen=True, kw_only=True):
    status: int
    code: str
    message: str

    @classmethod
    def of(cls, send_id: str, error: EngineError) -> "Refused":
        return cls(send_id=send_id, status=error.status, code=error.code, message=error.message)

    def error(self) -> EngineError:
        return from_answer(self.status, self.code, self.message)


AnyNote = Offer | Go | Written | Stopped | Held | Refused
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyNote)


def encode_note(note: Note) -> bytes:
    return _encoder.encode(note)


def decode_note(raw: bytes) -> AnyNote:
    """Raises `msgspec.DecodeError`."""
    return _decoder.decode(raw)


def rows_hash(rows: Runs) -> int:
    """A hash of reserved rows; equal in every process."""
    return xxhash.xxh64_intdigest(_encoder.encode(rows))


def tokens_hash(tokens: bytes) -> int:
    """A hash of token ids, as 32-bit integers; equal in every process."""
    return xxhash.xxh64_intdigest(tokens)
