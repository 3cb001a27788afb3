"""The transfer protocol between two emulated engines, on a TCP connection of its own for each transfer.

1. sender → receiver: `Offer`; 2. receiver → sender: `Verdict`, whether to go on; 3. sender → receiver: the payload;
4. receiver → sender: `Verdict`, whether it is now in the receiver's context cache.

Messages are JSON behind their length and checksum, four bytes each. The payload stands for the KV: 64 bytes a token,
computed from the token ids, so that the receiver can tell the right bytes from any others.
"""

import asyncio
import struct
import zlib
from array import array
from typing import TypeVar

import msgspec
import numpy as np

from engines.errors import EngineError, TransferFailed, from_answer
from engines.types import KvLayout

Message = TypeVar("Message", bound=msgspec.Struct)
BYTES_PER_TOKEN = 64
MAX_MESSAGE_BYTES = 64 * 1024
HEAD = struct.Struct("!II")
"""Length and CRC-32 of a message."""
# One odd multiplier for each of the 16 words that stand for a token.
FACTORS = (np.arange(16, dtype=np.uint32) * np.uint32(0x9E3779B2) + np.uint32(0x85EBCA6B)) | np.uint32(1)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    nonce: str
    epoch: str
    layout: KvLayout
    begin: int
    end: int
    payload_bytes: int
    crc32: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    status: int = 200
    code: str | None = None
    message: str = ""

    @classmethod
    def of(cls, error: EngineError) -> "Verdict":
        return cls(ok=False, status=error.status, code=error.code, message=error.message)

    def raise_if_refused(self) -> None:
        if not self.ok:
            raise from_answer(self.status, self.code, self.message)


def payload_of(tokens: "array[int]") -> bytes:
    """The bytes that stand for the KV of `tokens`, 64 for each."""
    ids = np.frombuffer(tokens, dtype=np.uint32) if tokens else np.empty(0, dtype=np.uint32)
    words = (ids[:, None] + np.uint32(1)) * FACTORS[None, :]
    return words.astype("<u4").tobytes()


def checksum(payload: bytes) -> int:
    return zlib.crc32(payload)


async def send_message(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    encoded = msgspec.json.encode(message)
    writer.write(HEAD.pack(len(encoded), checksum(encoded)) + encoded)
    await writer.drain()


async def read_message(reader: asyncio.StreamReader, kind: type[Message], timeout_s: float) -> Message:
    """Raises `TransferFailed` if what comes is cut short, too long, late or not a `kind`."""
    length, crc32 = HEAD.unpack(await read_bytes(reader, HEAD.size, timeout_s))
    if length > MAX_MESSAGE_BYTES:
        raise TransferFailed(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    encoded = await read_bytes(reader, length, timeout_s)
    if checksum(encoded) != crc32:
        raise TransferFailed("a message was corrupted on the way")
    try:
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferFailed(f"what came is not a {kind.__name__}: {error}") from error


async def read_bytes(reader: asyncio.StreamReader, count: int, timeout_s: float) -> bytes:
    """Exactly `count` bytes; none of them may take longer than `timeout_s`. Raises `TransferFailed`."""
    parts = []
    missing = count
    while missing:
        try:
            async with asyncio.timeout(timeout_s):
                part = await reader.read(min(missing, 1 << 20))
        except (OSError, TimeoutError) as error:
            raise TransferFailed(f"the transfer broke off: {error!r}") from error
        if not part:
            raise TransferFailed(f"the transfer was cut: {missing} of {count} bytes are missing")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
