"""The plugin's part in the scheduler process: calls from the HTTP process, transfers, and what passes tell.

Everything runs on the scheduler's own thread, between its passes. No SGLang in here: see `internals`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from engines.errors import BadRequest, Draining, EngineError, TransferFailed, from_answer
from engines.protocol import Config
from engines.sglang.knobs import check_knobs
from engines.sglang.messages import (
    AddPeer,
    AllWritten,
    Answer,
    AnyCall,
    AskHeld,
    AskLoad,
    Claim,
    Describe,
    Description,
    Done,
    Failed,
    LoadReport,
    Message,
    Prefilled,
    Release,
    Replay,
    Reserve,
    Reserved,
    Send,
    SendReport,
    Sent,
    SetDraining,
    SetKnobs,
    StopSend,
    decode_call,
    encode,
    unpack_tokens,
)
from engines.sglang.receiver import Receiver, reserved_rows
from engines.sglang.reporter import Reporter
from engines.sglang.reservations import Reservation, Reservations
from engines.sglang.sender import BUSY, IDLE, Outgoing, Sender, Times
from engines.sglang.view import Computed, Identity, Pass, Transport, View
from engines.sglang.wire import (
    Go,
    Held,
    KvAddress,
    Offer,
    Peer,
    Refused,
    Stopped,
    Written,
    decode_note,
)
from engines.types import EngineLoad

log = structlog.get_logger(__name__)
REPORT_EVERY_S = 0.25
TOKEN_BYTES = 4
CHANGES_ROOM = (Reserve, Release, SetDraining)
WAIT_RESERVED_MS = 5
"""How long an idle loop may sleep while memory is promised: nothing wakes it when a note from another engine comes."""
REST_S = 0.005
LOOK_EVERY_S = 0.0002
"""While a transfer is under way, when each note is waited for."""


class Handler:
    """One engine's microserving state. Created once, in the scheduler process."""

    def __init__(
        self,
        view: View,
        transport: Transport,
        identity: Identity,
        clock: Callable[[], float],
        wall: Callable[[], float],
        new_nonce: Callable[[], str],
        stall_s: float,
        with_checksums: bool,
    ) -> None:
        self._view = view
        self._transport = transport
        self._identity = identity
        self._clock = clock
        self._wall = wall
        self._reporter = Reporter(identity, view.bytes_per_token, clock, wall)
        self.reservations = Reservations(view, self._stop_sender, new_nonce)
        self._receiver = Receiver(
            self.reservations,
            view,
            identity.epoch,
            transport.notify,
            clock,
            self._reporter.on_received,
            self._reporter.counters.transfers,
        )
        self._sender = Sender(
            view, transport, transport.notify, clock, stall_s, with_checksums, self._on_written, self._on_sent
        )
        self._with_checksums = with_checksums
        self._draining = False
        self._arrived_s: dict[str, float] = {}
        self._launched_s: dict[str, float] = {}
        self._replays: dict[str, bytes] = {}
        self._computed_to: dict[str, int] = {}
        self._stashed_to: dict[str, int] = {}

    # What SGLang's loop calls.

    def on_call(self, payload: bytes) -> None:
        """One call from the HTTP process; its answer goes out at once or, for `Send`, when the transfer ends."""
        call = decode_call(payload)
        # Whoever calls may know of a transfer whose last note has not been read here yet.
        self._take_notes()
        try:
            answer = self._answer(call)
            if isinstance(call, CHANGES_ROOM):
                # Before the answer: whoever got it must not be told an older load.
                self._report()
        except EngineError as error:
            answer = Failed.of(call.call_id, error)
        if answer is not None:
            self._tell(answer)

    def poll(self, *, busy: bool) -> None:
        """Between two passes: take notes, move transfers on, let reservations expire."""
        self._take_notes()
        if len(self._sender):
            self._sender.step(BUSY if busy else IDLE)
        self._expire()
        if self._reporter.is_due:
            self._report()

    def on_idle(self) -> None:
        """There is nothing to run."""
        self._reporter.on_idle()

    def on_arrival(self, rid: str) -> None:
        """A generation of ours reached the scheduler."""
        self._arrived_s[rid] = self._clock()

    def on_stashed(self, rid: str, to: int, request: Any) -> None:
        """A chunk's KV is in the context cache, though perhaps not computed yet."""
        if rid in self._sender:
            self._stashed_to[rid] = to
            self._hand_over_chunk(rid, request)

    def on_pass(self, ended: Pass) -> None:
        for computed in ended.prefills:
            self._on_computed(computed, ended)
        if ended.prefills and len(self._sender):
            self._sender.step(BUSY if ended.decode_batch or ended.queued else IDLE)
        self._reporter.on_pass(ended)
        if ended.finished or ended.prefills:
            self._report()

    def on_dropped(self, rid: str) -> None:
        """A generation was dropped while it waited, or between two of its chunks."""
        self._sender.fail(rid, BadRequest("the prefill of this transfer was aborted"))
        self._forget(rid)

    def take_replay(self, rid: str) -> Sequence[int]:
        """Tokens that the grammar of a resumed generation has to see before it begins."""
        return unpack_tokens(self._replays.pop(rid, b""))

    def _forget(self, rid: str) -> None:
        for kept in (self._arrived_s, self._launched_s, self._computed_to, self._stashed_to, self._replays):
            kept.pop(rid, None)

    def before_flush(self) -> None:
        """The context cache is about to be emptied: nothing may be promised in it."""
        self.reservations.release_all(claimed=True)

    @property
    def holds_memory(self) -> bool:
        return len(self.reservations) > 0 or len(self._sender) > 0

    def rest(self, wait_ms: Callable[[int], object], nap: Callable[[float], object]) -> None:
        """An idle loop's sleep while memory is promised: until there is input (`wait_ms` says so), or for a moment."""
        if not self._in_touch:
            wait_ms(WAIT_RESERVED_MS)
            return
        until_s = self._clock() + REST_S
        while not wait_ms(0) and self._in_touch and self._clock() < until_s:
            self.poll(busy=False)
            if not self._sender.moving:
                nap(LOOK_EVERY_S)

    @property
    def _in_touch(self) -> bool:
        """Whether a transfer is under way, in or out."""
        return len(self._sender) > 0 or self.reservations.writing > 0

    # Calls.

    def _answer(self, call: AnyCall) -> Answer | None:
        if isinstance(call, AskLoad):
            return self._load_report(call.call_id)
        if isinstance(call, Reserve):
            return self._reserve(call)
        if isinstance(call, Send):
            self._send(call)
            return None
        if isinstance(call, SetKnobs):
            return self._set_knobs(call)
        if isinstance(call, Describe):
            return self._describe(call)
        self._do(call)
        return Done(call_id=call.call_id)

    def _do(self, call: Release | Claim | Replay | AddPeer | AskHeld | StopSend | SetDraining) -> None:
        if isinstance(call, Release):
            self.reservations.release(call.request_id)
        elif isinstance(call, Claim):
            self.reservations.claim(call.request_id, self._clock())
        elif isinstance(call, Replay):
            self._replays[call.rid] = call.tokens
        elif isinstance(call, AddPeer):
            self._add_peer(call.peer)
        elif isinstance(call, AskHeld):
            self._check_held(call)
        elif isinstance(call, StopSend):
            self._sender.fail(call.rid, from_answer(call.status, call.code, call.message))
        else:
            self._draining = call.on
            if call.on:
                self.reservations.release_all()

    def _add_peer(self, peer: Peer) -> None:
        """A peer in a new life writes nothing any more in its earlier ones."""
        for agent in self._transport.earlier_lives(peer.agent):
            self.reservations.sender_lost(agent)
            self._transport.forget(agent)
        self._transport.add_peer(peer)

    def _describe(self, call: Describe) -> Description:
        return Description(
            call_id=call.call_id,
            engine_id=self._identity.engine_id,
            peer=Peer(
                agent=self._identity.agent,
                epoch=self._identity.epoch,
                metadata=self._transport.metadata,
                layout=self._view.layout,
                memory=self._view.memory,
                device_id=self._view.device_id,
                buffers=self._view.buffers,
            ),
            kv_capacity_tokens=self._view.capacity_tokens,
            context_length_tokens=self._view.context_length_tokens,
            vocab_size=self._view.vocab_size,
            device=self._view.device,
            transports=self._identity.transports,
        )

    def _reserve(self, call: Reserve) -> Reserved:
        if self._draining:
            raise Draining("this engine is draining: send new work elsewhere", retry_after_s=1.0)
        if not self._identity.transports:
            raise BadRequest("this engine cannot receive KV: its log says why")
        stored_end = call.end // self._view.page_size * self._view.page_size
        reservation = self.reservations.open(
            call.request_id,
            call.prompt[: stored_end * TOKEN_BYTES],
            call.end,
            stored_end,
            call.ttl_s,
            self._clock(),
            self._view.spare_tokens(),
        )
        reservation.trace_id = call.trace_id
        address = KvAddress(
            url="",
            agent=self._identity.agent,
            epoch=self._identity.epoch,
            request_id=call.request_id,
            nonce=reservation.nonce,
            begin=reservation.matched,
            end=reservation.end,
            stored_end=stored_end,
            layout=self._view.layout,
            rows=reserved_rows(reservation, self._view),
            expires_at_s=self._wall() + call.ttl_s,
        )
        return Reserved(call_id=call.call_id, address=address, prefix_matched_length=reservation.matched)

    def _send(self, call: Send) -> None:
        if self._draining:
            raise Draining("this engine is draining: send new work elsewhere", retry_after_s=1.0)
        if not self._transport.knows(call.address.agent):
            raise TransferFailed("the receiver is not known here yet")
        ids = call.prompt[: call.address.stored_end * TOKEN_BYTES]
        self._sender.start(call.rid, call.call_id, call.address, ids)

    def _set_knobs(self, call: SetKnobs) -> LoadReport:
        wanted = Config(
            chunked_prefill_tokens=call.chunked_prefill_tokens, prefill_decode_interval=call.prefill_decode_interval
        )
        check_knobs(wanted, self._view.page_size)
        self._view.set_knobs(wanted)
        return self._load_report(call.call_id)

    def _check_held(self, call: AskHeld) -> None:
        if not self.reservations.find(call.request_id, call.nonce, self._clock()).received:
            raise TransferFailed(f"not all KV of request {call.request_id!r} is here yet")

    # Notes from other engines.

    def _take_notes(self) -> None:
        for agent, raw in self._transport.take_notes():
            self._on_note(agent, raw)

    def _on_note(self, agent: str, raw: bytes) -> None:
        try:
            note = decode_note(raw)
        except msgspec.DecodeError as error:
            log.warning("a note that cannot be read", agent=agent, error=str(error))
            return
        if isinstance(note, Offer):
            self._receiver.on_offer(agent, note)
        elif isinstance(note, Written):
            self._receiver.on_written(agent, note)
        elif isinstance(note, Stopped):
            self._receiver.on_stopped(agent, note)
        elif isinstance(note, Go | Held | Refused):
            self._sender.on_note(agent, note)

    def _stop_sender(self, reservation: Reservation) -> None:
        self._receiver.stop(reservation)

    # What passes computed.

    def _on_computed(self, computed: Computed, ended: Pass) -> None:
        rid = computed.rid
        if rid not in self._arrived_s:
            return
        self._launched_s.setdefault(rid, ended.launched_s)
        if computed.aborted:
            self.on_dropped(rid)
        elif computed.through:
            self._on_through(computed, ended)
        else:
            self._computed_to[rid] = computed.to
            self._hand_over_chunk(rid, computed.request)

    def _on_through(self, computed: Computed, ended: Pass) -> None:
        times = Times(
            received_s=self._arrived_s[computed.rid],
            started_s=self._launched_s[computed.rid],
            prefilled_s=ended.ended_s,
        )
        if computed.rid in self._sender:
            self._hand_over_rest(computed, times)
        else:
            queue_s = max(0.0, times.started_s - times.received_s)
            prefill_s = max(0.0, times.prefilled_s - times.started_s)
            self._tell(Prefilled(rid=computed.rid, queue_s=queue_s, prefill_s=prefill_s))
        self._forget(computed.rid)

    def _hand_over_chunk(self, rid: str, request: Any) -> None:
        """A chunk may go once it is both computed and where it stays; which of the two comes first varies."""
        begin = self._sender.final_to(rid)
        to = min(self._computed_to.get(rid, 0), self._stashed_to.get(rid, 0))
        to -= to % self._view.page_size
        if begin is not None and to > begin:
            self._sender.chunk_is_final(rid, to, self._view.request_slots(request, begin, to))

    def _hand_over_rest(self, computed: Computed, times: Times) -> None:
        """The whole prompt is in the context cache: keep it there until it is sent."""
        rid, begin = computed.rid, self._sender.final_to(computed.rid)
        stored_end = self._sender.stored_end(rid)
        matched, node = self._view.match(self._view.request_ids(computed.request, stored_end))
        if begin is None or matched < stored_end:
            self._sender.fail(rid, TransferFailed("the context cache did not keep the prompt: is it switched off?"))
            return
        lock = self._view.lock(node)
        self._sender.chunk_is_final(rid, stored_end, self._view.path_slots(node)[begin:stored_end])
        self._sender.all_is_computed(rid, times, computed.cached_tokens, lock)

    # Outcomes and reports.

    def _on_written(self, send: Outgoing, so_far: SendReport) -> None:
        self._tell(
            AllWritten(
                rid=send.rid,
                with_checksums=self._with_checksums,
                report=so_far,
                computed_s=self._clock() - so_far.transfer_s,
            )
        )

    def _on_sent(self, send: Outgoing, outcome: SendReport | EngineError) -> None:
        if isinstance(outcome, EngineError):
            self._tell(Failed.of(send.call_id, outcome))
            return
        self._tell(Sent(call_id=send.call_id, report=outcome))

    def _load_report(self, call_id: int) -> LoadReport:
        self._expire()
        return LoadReport(call_id=call_id, load=self._load(), totals=self._reporter.totals)

    def _report(self) -> None:
        self._tell(self._reporter.take(self._load()))

    def _expire(self) -> None:
        if len(self.reservations):
            self._reporter.counters.expired_reservations += self.reservations.expire(self._clock())

    def _load(self) -> EngineLoad:
        found, knobs = self._view.loads(), self._view.knobs()
        reserved_tokens = self.reservations.tokens
        return EngineLoad(
            running=found.running,
            queued=found.queued,
            pending_prefill_tokens=found.pending_prefill_tokens,
            kv_used_tokens=max(0, found.outside_cache_tokens - reserved_tokens),
            kv_reserved_tokens=reserved_tokens,
            kv_capacity_tokens=self._view.capacity_tokens,
            inbound_transfers=self.reservations.writing,
            draining=self._draining,
            chunked_prefill_tokens=knobs.chunked_prefill_tokens,
            prefill_decode_interval=knobs.prefill_decode_interval,
            prefill_tokens_per_s=self._reporter.prefill_tokens_per_s,
        )

    def _tell(self, message: Message) -> None:
        self._view.report(encode(message))
