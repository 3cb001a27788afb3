"""The receiving end of KV transfers: takes only what was reserved, checks it, and only then makes it visible."""

import asyncio
import secrets
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from structlog.contextvars import bind_contextvars, get_contextvars

from engines.emulated.kernel import Kernel, Reservation
from engines.emulated.kv_wire import (
    BYTES_PER_TOKEN,
    Offer,
    Verdict,
    checksum,
    payload_of,
    read_bytes,
    read_message,
    send_message,
)
from engines.emulated.shared_link import SharedLink
from engines.errors import BadRequest, EngineError, LayoutMismatch, ReservationGone, TransferFailed
from engines.metrics import Counters
from engines.types import KvLayout

log = structlog.get_logger(__name__)
OnReceived = Callable[[float, int, int], None]
"""Wall seconds, modelled bytes and how many transfers shared the link."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What a sender must match to write."""

    nonce: str
    tokens: "array[int]"
    begin: int
    end: int
    expires_at_s: float
    ids: Mapping[str, str]
    """What log lines about it name: request and trace, as those of the call that reserved."""


class KvReceiver:
    """Serves the transfer socket. A transfer that fails in any way changes nothing: its reservation is still there."""

    def __init__(
        self,
        kernel: Kernel,
        link: SharedLink,
        layout: KvLayout,
        epoch: str,
        clock: Callable[[], float],
        counters: Counters,
        on_received: OnReceived,
        stall_s: float,
    ) -> None:
        self._kernel = kernel
        self._link = link
        self._layout = layout
        self._epoch = epoch
        self._clock = clock
        self._counters = counters
        self._on_received = on_received
        self._stall_s = stall_s
        self._opened: dict[str, Opened] = {}
        self._flows = 0

    @property
    def active(self) -> int:
        return self._link.active

    def open(self, reservation: Reservation) -> str:
        """Let the KV of a reservation in; the nonce that its sender must show."""
        nonce = secrets.token_hex(8)
        begin, end = reservation.begin, reservation.end
        tokens = reservation.prompt[begin:end]
        self._drop_expired()
        ids = {"request_id": reservation.request_id, **get_contextvars()}
        self._opened[reservation.request_id] = Opened(nonce, tokens, begin, end, reservation.expires_at_s, ids)
        return nonce

    def close(self, request_id: str) -> None:
        """Let nothing in for this request any more. The kernel's reservation is the caller's to release."""
        self._opened.pop(request_id, None)

    def close_all(self) -> None:
        self._opened.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one transfer."""
        try:
            verdict = await self._verdict(reader, writer)
            await send_message(writer, verdict)
        except OSError as error:
            log.info("sender left before the verdict", error=str(error))
        finally:
            writer.close()

    async def _verdict(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Verdict:
        try:
            offer = await read_message(reader, Offer, self._stall_s)
            self._bind_ids(offer.request_id)
            await self._take(offer, reader, writer)
        except EngineError as error:
            self._counters.transfers[error.code] += 1
            log.warning("transfer refused", error=error.for_logs)
            return Verdict.of(error)
        self._counters.transfers["ok"] += 1
        return Verdict(ok=True)

    def _bind_ids(self, request_id: str) -> None:
        """For the lines of this connection, which is one transfer and one task."""
        opened = self._opened.get(request_id)
        bind_contextvars(**(opened.ids if opened is not None else {"request_id": request_id}))

    async def _take(self, offer: Offer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = self._checked(offer)
        await send_message(writer, Verdict(ok=True))
        begun_s = self._clock()
        nbytes = self._layout.bytes_per_token * (offer.end - offer.begin)
        self._flows += 1
        arrival = self._link.start(f"{offer.nonce}.{self._flows}", nbytes)
        concurrent = self._link.active
        try:
            payload = await read_bytes(reader, offer.payload_bytes, self._stall_s)
            _check_payload(offer, opened, payload)
            await arrival
        finally:
            arrival.cancel()
        self._commit(offer)
        wall_s = self._clock() - begun_s
        self._counters.transfer_bytes += nbytes
        self._counters.transfer_s += wall_s
        self._on_received(wall_s, nbytes, concurrent)

    def _checked(self, offer: Offer) -> Opened:
        """The reservation behind an offer. Raises what is wrong with the offer."""
        opened = self._opened.get(offer.request_id)
        if offer.epoch != self._epoch or opened is None or opened.nonce != offer.nonce:
            raise ReservationGone(f"there is no such reservation for request {offer.request_id!r}")
        if self._clock() >= opened.expires_at_s:
            raise ReservationGone(f"the reservation for request {offer.request_id!r} has expired")
        if offer.layout != self._layout:
            raise LayoutMismatch(f"this engine keeps {self._layout}, the sender {offer.layout}")
        if (offer.begin, offer.end) != (opened.begin, opened.end):
            raise BadRequest(f"[{offer.begin}, {offer.end}) is not the reserved [{opened.begin}, {opened.end})")
        if offer.payload_bytes != BYTES_PER_TOKEN * len(opened.tokens):
            raise TransferFailed(f"{offer.payload_bytes} bytes were offered for {len(opened.tokens)} tokens")
        return opened

    def _commit(self, offer: Offer) -> None:
        opened = self._opened.get(offer.request_id)
        if opened is None or opened.nonce != offer.nonce:
            raise ReservationGone(f"the reservation for request {offer.request_id!r} went during the transfer")
        self._kernel.receive(offer.request_id, offer.begin, offer.end, self._clock())

    def _drop_expired(self) -> None:
        """Forget old entries, oldest first; the kernel keeps its own time."""
        now_s = self._clock()
        for request_id in [key for key, opened in self._opened.items() if now_s >= opened.expires_at_s]:
            del self._opened[request_id]


def _check_payload(offer: Offer, opened: Opened, payload: bytes) -> None:
    if checksum(payload) != offer.crc32:
        raise TransferFailed("the payload's checksum is wrong: it was corrupted on the way")
    if payload != payload_of(opened.tokens):
        raise TransferFailed("the payload is not the KV of the reserved tokens")
