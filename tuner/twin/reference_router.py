"""The router inside the reference simulator: places, admits, lets wait, reserves, has KV sent and answers made."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from engines.emulated.events import Finished, Prefilled
from engines.errors import BadRequest, ContextTooLong, NoKvRoom, ReservationGone
from engines.records import Outcome, TransferRecord
from engines.types import EngineTimings
from tuner.placement import Verdict, admit, place
from tuner.plan import Admission
from tuner.prefix import PrefixIndex
from tuner.twin.events import Events
from tuner.twin.limits import BLOCK_TOKENS, INDEX_BLOCKS, QUEUE, QUEUE_S, RESERVATION_TTL_S
from tuner.twin.records import SimulatedRecord
from tuner.twin.reference_call import Call
from tuner.twin.reference_engine import ReferenceEngine, Samples


class ReferenceRouter:
    """Does to simulated engines what the router's `Call` and `Service` do to real ones, without any network between.

    `drive` is called for an engine that may have something to do.
    """

    def __init__(
        self, engines: Sequence[ReferenceEngine], events: Events, drive: Callable[[ReferenceEngine], None]
    ) -> None:
        self._engines = {engine.engine_id: engine for engine in engines}
        self._views = [engine.view for engine in engines]
        self._events = events
        self._drive = drive
        self._index = PrefixIndex(INDEX_BLOCKS)
        self._waiting: deque[Call] = deque()
        self._woken: deque[Call] = deque()
        self._open: dict[str, Call] = {}
        self.ended: list[SimulatedRecord] = []
        self.samples: Samples | None = None

    @property
    def open(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._open)

    def arrive(self, call: Call) -> None:
        self._open[call.request_id] = call
        self._place(call)
        self._admit(call)

    def holds(self, blocks: Sequence[int], engine_id: str) -> None:
        """An engine was given these blocks by other ways than a request."""
        self._index.add(blocks, engine_id)

    def settle(self) -> None:
        """Let those try who were woken by what just happened."""
        while self._woken:
            self._retry(self._woken.popleft())

    def wake(self) -> None:
        """Something became free: the one who has waited longest may try."""
        while self._waiting:
            call = self._waiting.popleft()
            if call.waits_since_s is not None:
                self._woken.append(call)
                return

    # what engines report

    def first_token(self, request_id: str) -> None:
        call = self._open[request_id]
        if call.first_s is None and call.generation is not None:
            call.first_s = self._events.now_s
            call.generation.prefilled()

    def finished(self, event: Finished) -> None:
        call = self._open[event.request_id]
        self._end(call, Outcome.OK, event.timings)

    def prefilled(self, event: Prefilled) -> None:
        """P is through: the KV goes over D's link."""
        call = self._open[event.request_id]
        sender, receiver = call.prefill, call.decode
        if sender is None or receiver is None:
            raise RuntimeError(f"request {call.request_id} prefills nowhere")
        call.queue_s += event.queue_s
        call.prefill_s += event.prefill_s - event.queue_s
        call.sent_s = self._events.now_s
        call.sent_bytes = receiver.bytes_per_token * (call.end - call.begin)
        receiver.link.start(call.request_id, call.sent_bytes, self._events.now_s)
        self._watch_link(receiver)

    # admission and waiting

    def _place(self, call: Call) -> None:
        request = call.placement_request(self._index, BLOCK_TOKENS)
        call.placement = place(call.plan, request, self._views, call.turn)

    def _admit(self, call: Call) -> None:
        if not call.placement.decode:
            self._end(call, Outcome.FAILED)
            return
        verdict = self._verdict(call)
        if verdict is Verdict.SHED:
            self._end(call, Outcome.SHED)
        elif verdict is Verdict.WAIT:
            self._wait(call)
        else:
            call.waited = False
            self._start(call)

    def _verdict(self, call: Call) -> Verdict:
        if call.plan.knobs.admission is Admission.OFF:
            return Verdict.ADMIT
        placement = call.placement
        decode = self._engines[placement.decode[0]]
        prefill = self._engines[placement.prefill[0]] if placement.is_split else decode
        request = call.placement_request(self._index, BLOCK_TOKENS)
        return admit(call.plan, call.slo, request, decode.view, prefill.view)

    def _may_go_on(self, call: Call) -> bool:
        """Others may have been admitted while this one waited for room."""
        queued = call.plan.knobs.admission is Admission.QUEUE and bool(call.placement.decode)
        return not queued or self._verdict(call) is Verdict.ADMIT

    def _wait(self, call: Call) -> None:
        if len(self._waiting) >= QUEUE and not call.waited:
            self._end(call, Outcome.NO_ROOM)
            return
        call.waits_since_s = self._events.now_s
        if call.waited:
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)
            self._events.at(call.arrived_s + QUEUE_S, self._give_up, call)

    def _give_up(self, call: Call) -> None:
        if call.waits_since_s is None:
            return
        self._stop_waiting(call)
        self._waiting.remove(call)
        self._end(call, Outcome.NO_ROOM)

    def _stop_waiting(self, call: Call) -> None:
        if call.waits_since_s is not None:
            call.queue_s += self._events.now_s - call.waits_since_s
            call.waits_since_s = None

    def _retry(self, call: Call) -> None:
        self._stop_waiting(call)
        call.waited = True
        self._place(call)
        if not call.reserving:
            self._admit(call)
        elif self._may_go_on(call):
            self._reserve(call)
        else:
            self._wait(call)

    # the pattern

    def _start(self, call: Call) -> None:
        placement = call.placement
        if placement.end is None or not placement.prefill:
            self._generate(call, self._engines[placement.decode[0]])
            return
        call.reserving = True
        call.end = placement.end
        self._reserve(call)

    def _reserve(self, call: Call) -> None:
        """Room on the best decode engine that has some; without, back into the queue."""
        for engine_id in call.placement.decode:
            engine = self._engines[engine_id]
            if engine.own_transfers < call.plan.knobs.max_inflight_transfers and self._reserve_on(call, engine):
                if call.waited:
                    self.wake()
                return
            if call.done:
                return
        if call.placement.decode:
            self._wait(call)
        else:
            self._end(call, Outcome.FAILED)

    def _reserve_on(self, call: Call, engine: ReferenceEngine) -> bool:
        now_s = self._events.now_s
        engine.expire(now_s)
        try:
            reservation = engine.kernel.reserve(call.request_id, call.prompt, call.end, RESERVATION_TTL_S, now_s)
        except NoKvRoom:
            return False
        except (BadRequest, ContextTooLong):
            self._end(call, Outcome.REJECTED)
            return False
        engine.expiry_s = min(engine.expiry_s, now_s + RESERVATION_TTL_S)
        engine.own_transfers += 1
        engine.own_inflight += 1
        engine.refresh()
        call.decode, call.begin = engine, reservation.begin
        self._send(call, engine)
        return True

    def _send(self, call: Call, receiver: ReferenceEngine) -> None:
        senders = [each for each in call.placement.prefill if each != receiver.engine_id]
        if call.begin >= call.end or not senders:
            self._sent(call)
            return
        sender = call.prefill = self._engines[senders[0]]
        call.hold(sender, call.end - call.begin)
        sender.kernel.submit_prefill(call.request_id, call.prompt, call.end, self._events.now_s)
        self._drive(sender)

    def _watch_link(self, receiver: ReferenceEngine) -> None:
        following = receiver.link.next_completion()
        receiver.link_version += 1
        if following is not None:
            self._events.at(following[1], self._on_link, (receiver, receiver.link_version))

    def _on_link(self, due: tuple[ReferenceEngine, int]) -> None:
        receiver, version = due
        if version != receiver.link_version:
            return
        now_s = self._events.now_s
        for request_id in receiver.link.advance(now_s):
            call = self._open[request_id]
            concurrent = receiver.link.active + 1
            self._received(call, receiver, concurrent)
        self._watch_link(receiver)

    def _received(self, call: Call, receiver: ReferenceEngine, concurrent: int) -> None:
        now_s = self._events.now_s
        call.transfer_s = now_s - (call.sent_s or 0.0)
        with contextlib.suppress(ReservationGone):  # it took too long: D computes what it lacks
            receiver.kernel.receive(call.request_id, call.begin, call.end, now_s)
        self._sample(call, receiver, concurrent)
        sender = call.prefill
        if sender is not None:
            sender.kernel.release_prefill(call.request_id, now_s)
            call.holds.pop().release()
            self._index.add(call.blocks, sender.engine_id)
            self._drive(sender)
        self._sent(call)

    def _sample(self, call: Call, receiver: ReferenceEngine, concurrent: int) -> None:
        if self.samples is not None and call.transfer_s is not None and call.sent_bytes is not None:
            self.samples.transfers.append(
                TransferRecord(
                    engine_id=receiver.engine_id,
                    kind=receiver.profile.kind,
                    at_s=self._events.now_s,
                    wall_s=call.transfer_s,
                    bytes=call.sent_bytes,
                    concurrent=concurrent,
                )
            )

    def _sent(self, call: Call) -> None:
        """D holds what it can be given, and answers."""
        if call.decode is None:
            raise RuntimeError(f"request {call.request_id} has no engine to decode on")
        call.decode.own_transfers -= 1
        call.decode.own_inflight -= 1
        call.decode.refresh()
        self.wake()
        self._generate(call, call.decode)

    def _generate(self, call: Call, engine: ReferenceEngine) -> None:
        call.decode = engine
        self._index.add(call.blocks, engine.engine_id)
        call.generation = call.hold(engine, max(1, call.prompt_tokens - call.end))
        try:
            engine.kernel.submit_generation(call.request_id, call.prompt, call.output_tokens, self._events.now_s)
        except (BadRequest, ContextTooLong):
            engine.kernel.release(call.request_id, self._events.now_s)
            self._end(call, Outcome.REJECTED)
        self._drive(engine)

    def _end(self, call: Call, outcome: Outcome, timings: EngineTimings | None = None) -> None:
        call.done = True
        del self._open[call.request_id]
        for held in call.holds:
            held.release()
        call.holds.clear()
        self.ended.append(call.record(outcome, timings, self._events.now_s))
        self.wake()
