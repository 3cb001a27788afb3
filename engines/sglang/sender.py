"""The sending end of transfers: chunks go out as they are computed, in small slices. No SGLang in here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.errors import EngineError, ReservationGone, TransferFailed
from engines.sglang.messages import SendReport
from engines.sglang.receiver import Notify
from engines.sglang.slots import Rows, from_runs
from engines.sglang.wire import (
    Go,
    Held,
    KvAddress,
    Note,
    Offer,
    Refused,
    Stopped,
    Written,
    encode_note,
    rows_hash,
    tokens_hash,
)


@dataclass(frozen=True, slots=True)
class Effort:
    """What a step may take of the scheduler's thread, where memory is copied by this very thread."""

    budget_s: float
    """No write begins later in a step."""
    slice_bytes: int
    """Most bytes of one write."""


BUSY = Effort(budget_s=0.004, slice_bytes=4 * 2**20)
"""Between two passes: a write takes a millisecond or two."""
IDLE = Effort(budget_s=0.05, slice_bytes=32 * 2**20)
"""Large writes have larger regions, and those cost less a byte."""


class Transport(Protocol):
    """One-sided writes into the memory of other engines. Raises `TransferFailed`."""

    def write(self, agent: str, mine: Rows, theirs: Rows, note: bytes | None) -> Any:
        """Start writing rows of the local pool into rows of `agent`'s; `note` arrives behind the last byte."""
        ...

    def is_done(self, handle: Any) -> bool:
        """Raises `TransferFailed` if it will never be; the handle is released either way once it is over."""
        ...

    def forget(self, agent: str) -> None:
        """Know an engine no more."""
        ...


class Pool(Protocol):
    """The local KV pool."""

    page_size: int
    bytes_per_token: int

    def checksum(self, slots: Rows) -> int: ...
    def rows(self, slots: Rows) -> Rows: ...
    def unlock(self, lock: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds on the scheduler's clock."""

    received_s: float
    started_s: float
    prefilled_s: float


OnWritten = Callable[["Outgoing", SendReport], None]
"""Everything is written. The receiver's word that it holds it is a note, which waits while a pass runs here."""
OnEnd = Callable[["Outgoing", SendReport | EngineError], None]


@dataclass(slots=True, eq=False)
class Outgoing:
    """One transfer."""

    rid: str
    """Of the generation that computes the KV; names the transfer too."""
    call_id: int
    address: KvAddress
    received_s: float
    deadline_s: float
    """When the receiver must have said something."""
    may_write: bool = False
    write_until_s: float = 0.0
    """No write may begin later: the slots may be another's soon after."""
    final_to: int = 0
    """KV up to here is computed and was handed over."""
    ready: list[Rows] = field(default_factory=list)
    """Local slots that wait to be written."""
    written_to: int = 0
    inflight: Any = None
    inflight_tokens: int = 0
    checksums: list[tuple[int, int]] = field(default_factory=list)
    times: Times | None = None
    """There once everything is computed."""
    cached_tokens: int = 0
    lock: Any = None
    failure: EngineError | None = None
    all_written: bool = False
    sharing: int = 1
    """Transfers that were being written at that moment, this one included."""
    held: bool = False
    """The receiver says that it has everything."""

    @property
    def writes(self) -> bool:
        """Whether there is something that it may write now."""
        return self.inflight is not None or (self.may_write and bool(self.ready))

    @property
    def waits(self) -> bool:
        """For the receiver's word."""
        return not self.may_write or self.all_written


class Sender:
    """All outgoing transfers of an engine. `step` drives them; call it between batches."""

    def __init__(
        self,
        pool: Pool,
        transport: Transport,
        notify: Notify,
        clock: Callable[[], float],
        stall_s: float,
        with_checksums: bool,
        on_written: OnWritten,
        on_end: OnEnd,
    ) -> None:
        self._pool = pool
        self._transport = transport
        self._notify = notify
        self._clock = clock
        self._stall_s = stall_s
        self._with_checksums = with_checksums
        self._on_written = on_written
        self._on_end = on_end
        self._sends: dict[str, Outgoing] = {}

    def __len__(self) -> int:
        return len(self._sends)

    def __contains__(self, rid: str) -> bool:
        return rid in self._sends

    @property
    def moving(self) -> bool:
        """Whether a step could move something on."""
        return any(send.writes for send in self._sends.values())

    def start(self, rid: str, call_id: int, address: KvAddress, ids: bytes) -> None:
        """Ask the receiver; `ids` is the prompt up to `stored_end`, as bytes."""
        now_s = self._clock()
        self._sends[rid] = Outgoing(
            rid, call_id, address, now_s, now_s + self._stall_s, final_to=address.begin, written_to=address.begin
        )
        self._notify(
            address.agent,
            Offer(
                send_id=rid,
                request_id=address.request_id,
                nonce=address.nonce,
                epoch=address.epoch,
                begin=address.begin,
                end=address.end,
                tokens_hash=tokens_hash(ids),
                rows_hash=rows_hash(address.rows),
            ),
        )

    def final_to(self, rid: str) -> int | None:
        """How far the KV of a transfer was handed over."""
        send = self._sends.get(rid)
        return None if send is None else send.final_to

    def stored_end(self, rid: str) -> int:
        return self._sends[rid].address.stored_end

    def chunk_is_final(self, rid: str, to: int, slots: Rows) -> None:
        """The slots of tokens `[final_to, to)`; they stay as they are until the transfer ends."""
        send = self._sends[rid]
        if to > send.final_to:
            send.ready.append(slots)
            send.final_to = to

    def all_is_computed(self, rid: str, times: Times, cached_tokens: int, lock: Any) -> None:
        """Everything was handed over; `lock` keeps it until the transfer ends."""
        send = self._sends[rid]
        send.times, send.cached_tokens, send.lock = times, cached_tokens, lock
        send.deadline_s = self._clock() + self._stall_s
        self._tell_written(send)

    def fail(self, rid: str, error: EngineError) -> None:
        """Give a transfer up, once what is in flight is through."""
        send = self._sends.get(rid)
        if send is not None and send.failure is None:
            send.failure = error
            self._end_if_quiet(send)

    def on_note(self, agent: str, note: Note) -> None:
        send = self._sends.get(note.send_id)
        if send is None or send.address.agent != agent:
            if isinstance(note, Go):
                self._notify(agent, Stopped(send_id=note.send_id, nonce=""))
            return
        send.deadline_s = self._clock() + self._stall_s
        if isinstance(note, Go):
            send.may_write = True
            # From the offer, not from now: the note may have waited here while a pass ran.
            send.write_until_s = send.received_s + note.write_for_s
        elif isinstance(note, Held):
            send.held = send.all_written = send.may_write = True
            send.ready.clear()
            self._end_if_held(send)
        elif isinstance(note, Refused):
            self.fail(send.rid, note.error())

    def step(self, effort: Effort) -> None:
        """Complete what is through and start more."""
        until_s = self._clock() + effort.budget_s
        for send in list(self._sends.values()):
            try:
                self._step_one(send, until_s, effort.slice_bytes)
            except TransferFailed as error:
                self._give_up(send, error)
                # A way that has failed once may be broken for good; engines that meet again get a new one.
                self._transport.forget(send.address.agent)
            except ReservationGone as error:
                self._give_up(send, error)

    def _give_up(self, send: Outgoing, error: EngineError) -> None:
        send.inflight = None
        self.fail(send.rid, error)

    def _step_one(self, send: Outgoing, until_s: float, slice_bytes: int) -> None:
        if send.inflight is not None and self._transport.is_done(send.inflight):
            self._slice_is_through(send)
        if send.failure is not None:
            self._end_if_quiet(send)
            return
        while send.inflight is None and send.may_write and send.ready and self._clock() < until_s:
            self._write_slice(send, slice_bytes)
            if self._transport.is_done(send.inflight):
                self._slice_is_through(send)
        self._check_deadline(send)
        self._end_if_held(send)

    def _write_slice(self, send: Outgoing, slice_bytes: int) -> None:
        if self._clock() >= send.write_until_s:
            raise ReservationGone("the reservation's time was over before everything was written")
        slots = self._next_slice(send, slice_bytes)
        theirs = from_runs(send.address.rows)
        page = self._pool.page_size
        first = (send.written_to - send.address.begin) // page
        mine = self._pool.rows(slots)
        if self._with_checksums:
            send.checksums.append((len(slots), self._pool.checksum(slots)))
        is_last = send.written_to + len(slots) == send.address.stored_end
        note = encode_note(self._written(send)) if is_last else None
        send.inflight_tokens = len(slots)
        send.inflight = self._transport.write(send.address.agent, mine, theirs[first : first + len(mine)], note)

    def _next_slice(self, send: Outgoing, slice_bytes: int) -> Rows:
        page = self._pool.page_size
        most = max(page, slice_bytes // self._pool.bytes_per_token // page * page)
        slots = send.ready.pop(0)
        if len(slots) > most:
            send.ready.insert(0, slots[most:])
        return slots[:most]

    def _slice_is_through(self, send: Outgoing) -> None:
        send.inflight = None
        send.written_to += send.inflight_tokens
        if send.written_to == send.address.stored_end:
            send.all_written = True
            send.sharing = 1 + sum(other.writes for other in self._sends.values() if other is not send)
            send.deadline_s = self._clock() + self._stall_s
            self._tell_written(send)

    def _written(self, send: Outgoing) -> Written:
        return Written(
            send_id=send.rid,
            nonce=send.address.nonce,
            tokens=send.address.stored_end - send.address.begin,
            checksums=tuple(send.checksums) if self._with_checksums else None,
        )

    def _check_deadline(self, send: Outgoing) -> None:
        if send.waits and not send.held and self._clock() >= send.deadline_s:
            what = "took the KV" if send.all_written else "let it in"
            self.fail(send.rid, TransferFailed(f"the receiver has not {what} within {self._stall_s:g} s"))

    def _end_if_held(self, send: Outgoing) -> None:
        """A transfer ends well when the receiver holds everything and the generation here is through with it."""
        if send.held and send.times is not None and send.rid in self._sends:
            self._end(send, self._report(send, send.times))

    def _tell_written(self, send: Outgoing) -> None:
        if send.all_written and send.times is not None and not send.held:
            self._on_written(send, self._report(send, send.times))

    def _report(self, send: Outgoing, times: Times) -> SendReport:
        """As of now."""
        return SendReport(
            cached_tokens=send.cached_tokens,
            bytes=self._pool.bytes_per_token * (send.address.stored_end - send.address.begin),
            queue_s=max(0.0, times.started_s - times.received_s),
            prefill_s=max(0.0, times.prefilled_s - times.received_s),
            transfer_s=self._clock() - times.prefilled_s,
            sharing=send.sharing,
        )

    def _end_if_quiet(self, send: Outgoing) -> None:
        if send.inflight is None and send.failure is not None and send.rid in self._sends:
            self._notify(send.address.agent, Stopped(send_id=send.rid, nonce=send.address.nonce))
            self._end(send, send.failure)

    def _end(self, send: Outgoing, outcome: SendReport | EngineError) -> None:
        del self._sends[send.rid]
        self._pool.unlock(send.lock)
        self._on_end(send, outcome)
