"""The receiving end of transfers: who may write, and what of the written becomes visible. No SGLang in here."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from engines.errors import BadRequest, EngineError, ReservationGone, TransferFailed
from engines.sglang.reservations import Reservation, Reservations
from engines.sglang.slots import Rows, to_runs
from engines.sglang.wire import Go, Held, Note, Offer, Refused, Runs, Stopped, Written, rows_hash, tokens_hash

log = structlog.get_logger(__name__)
Notify = Callable[[str, Note], None]
"""Send a note to an agent; never raises, a lost note is found out by time."""
OnReceived = Callable[[float, int], None]
"""Seconds from `Go` to visible, and tokens."""


class Pool(Protocol):
    def checksum(self, slots: Rows) -> int:
        """Of the KV in `slots`, over all buffers."""
        ...

    def rows(self, slots: Rows) -> Rows:
        """The pages that hold `slots`."""
        ...


def reserved_rows(reservation: Reservation, pool: Pool) -> Runs:
    """Where a sender may write."""
    return [] if reservation.slots is None else to_runs(pool.rows(reservation.slots))


class Receiver:
    """Answers the notes of senders. A transfer that fails in any way changes nothing that can be seen."""

    def __init__(
        self,
        reservations: Reservations,
        pool: Pool,
        epoch: str,
        notify: Notify,
        clock: Callable[[], float],
        on_received: OnReceived,
        outcomes: Counter[str],
    ) -> None:
        """`outcomes` counts how transfers end: `ok`, or the code of the error."""
        self._reservations = reservations
        self._pool = pool
        self._epoch = epoch
        self._notify = notify
        self._clock = clock
        self._on_received = on_received
        self._outcomes = outcomes

    def on_offer(self, agent: str, offer: Offer) -> None:
        now_s = self._clock()
        try:
            reservation = self._checked(offer)
            if reservation.received:
                self._notify(agent, Held(send_id=offer.send_id))
                return
            self._reservations.begin_write(reservation, agent, offer.send_id, now_s)
        except EngineError as error:
            self._refuse(agent, offer.send_id, error, offer.request_id)
            return
        self._notify(agent, Go(send_id=offer.send_id, write_for_s=reservation.write_for_s(now_s)))

    def on_written(self, agent: str, note: Written) -> None:
        reservation = self._reservations.writer(agent, note.send_id)
        try:
            if reservation is None or reservation.nonce != note.nonce:
                raise ReservationGone("the reservation went during the transfer")
            self._check(reservation, note)
        except EngineError as error:
            self._reservations.sender_stopped(agent, note.send_id)
            self._refuse(agent, note.send_id, error, None if reservation is None else reservation.request_id)
            return
        tokens, begun_s = reservation.tokens, reservation.begun_s
        self._reservations.receive(reservation)
        self._outcomes["ok"] += 1
        self._notify(agent, Held(send_id=note.send_id))
        self._on_received(self._clock() - begun_s, tokens)

    def on_stopped(self, agent: str, note: Stopped) -> None:
        self._reservations.sender_stopped(agent, note.send_id)

    def stop(self, reservation: Reservation) -> None:
        """Ask the sender of a given-up reservation to stop."""
        if reservation.sender is not None:
            agent, send_id = reservation.sender
            gone = ReservationGone("the reservation was given up during the transfer")
            self._refuse(agent, send_id, gone, reservation.request_id)

    def _checked(self, offer: Offer) -> Reservation:
        if offer.epoch != self._epoch:
            raise ReservationGone(f"request {offer.request_id!r} was reserved in an earlier life of this engine")
        reservation = self._reservations.find(offer.request_id, offer.nonce, self._clock())
        if (offer.begin, offer.end) != (reservation.matched, reservation.end):
            raise BadRequest(
                f"[{offer.begin}, {offer.end}) is not the reserved [{reservation.matched}, {reservation.end})"
            )
        if not reservation.received and offer.rows_hash != rows_hash(reserved_rows(reservation, self._pool)):
            raise BadRequest("kv_addr_info is not as it was given out: its rows differ")
        if offer.tokens_hash != tokens_hash(reservation.ids):
            raise TransferFailed("the sender would write the KV of other tokens than the reserved ones")
        return reservation

    def _check(self, reservation: Reservation, note: Written) -> None:
        if note.tokens != reservation.tokens:
            raise TransferFailed(f"{note.tokens} tokens were written, {reservation.tokens} were reserved")
        if note.checksums is not None and reservation.slots is not None:
            self._check_bytes(reservation.slots, note.checksums)

    def _check_bytes(self, slots: Rows, checksums: Sequence[tuple[int, int]]) -> None:
        begin = 0
        for tokens, expected in checksums:
            if self._pool.checksum(slots[begin : begin + tokens]) != expected:
                raise TransferFailed(f"tokens {begin} to {begin + tokens} of the transfer were corrupted on the way")
            begin += tokens

    def _refuse(self, agent: str, send_id: str, error: EngineError, request_id: str | None) -> None:
        self._outcomes[error.code] += 1
        trace_id = self._reservations.trace_id(request_id)
        log.warning("transfer refused", error=error.for_logs, request_id=request_id, trace_id=trace_id)
        self._notify(agent, Refused.of(send_id, error))
