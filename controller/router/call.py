"""One client request while the router works on it, and the microserving steps a pattern can take with it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import NamedTuple

import structlog
from structlog.typing import FilteringBoundLogger

from controller.router.fleet import Engine, Fleet, Lease, TransferSlot
from controller.router.openai import ApiError, Asked
from controller.router.tokens import TokenSource
from controller.router.waiting import Lack, QueueFull, RoomQueue
from controller.settings import Limits
from engines.client import Prompt
from engines.errors import Draining, EngineError, EngineTimeout, EngineUnreachable, NoKvRoom, TransferFailed
from engines.protocol import PrepRecvAnswer, ResumedChoice
from engines.tracing import Span
from tuner.placement import Placement, PlacementRequest, Verdict, admit, place
from tuner.plan import Admission, Plan
from tuner.prefix import BLOCK_BYTES, PrefixIndex, block_hashes
from tuner.slo import Slo

log = structlog.get_logger()

RESERVATION_TTL_S = 90.0
"""Longer than prefill and transfer of any one prompt may take; what is left of it protects the KV until D starts."""

MAX_SENDS = 2
"""A transfer and one retry into the same reservation; after that D recomputes."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room on a decode engine for `prompt[begin:end]`; it already holds what comes before."""

    engine_id: str
    kv_addr_info: str
    begin: int
    end: int
    slot: TransferSlot


class Generate(NamedTuple):
    """A pattern's last step: decode on this engine, which holds `prompt[:begin]` (as far as the router knows)."""

    engine_id: str
    begin: int = 0


NOWHERE = Placement(decode=())

Pattern = Callable[["Call"], AsyncGenerator[Generate, None]]
"""A short program of microserving steps; see `controller.router.patterns`."""


@dataclass(slots=True)
class Desk:
    """What all requests of a router share."""

    fleet: Fleet
    prefixes: PrefixIndex
    room: RoomQueue
    tokens: TokenSource
    limits: Limits
    loop: asyncio.AbstractEventLoop
    now_s: Callable[[], float]
    """Monotonic. The event loop's own clock is too coarse to measure latencies with."""
    turn: int = 0


class Call:
    """One request. Patterns read `prompt_tokens` and `placement`, and call `reserve`, `send_kv` and `generate`.

    Made once per request on the hot path: what most requests never need is shared or made when it is.
    """

    __slots__ = (
        "_avoid",
        "_leases",
        "_touched",
        "_turn",
        "asked",
        "attempts",
        "decode_engine",
        "desk",
        "hashes",
        "keep_whole",
        "pattern",
        "placement",
        "plan",
        "prefill_engine",
        "prefill_s",
        "prompt",
        "prompt_tokens",
        "queued_s",
        "request_id",
        "reserving",
        "resume",
        "resumed",
        "slo",
        "slo_class",
        "span",
        "split_begin",
        "split_end",
        "transfer_failures",
        "transfer_retries",
        "transfer_s",
        "transferred_bytes",
        "waited_s",
    )

    def __init__(
        self,
        request_id: str,
        asked: Asked,
        plan: Plan,
        pattern: "Pattern",
        slo_class: str,
        slo: Slo,
        span: Span,
        desk: Desk,
    ) -> None:
        self.request_id = request_id
        self.asked = asked
        self.plan = plan
        self.pattern = pattern
        self.slo_class = slo_class
        self.slo = slo
        self.span = span
        self.desk = desk
        self.hashes = block_hashes(asked.content)
        self.prompt: Prompt | None = None
        self.prompt_tokens = asked.estimated_tokens()
        """Exact once `tokenize` ran, before that an estimate from the prompt's size."""
        self.placement = NOWHERE
        self.resume: list[ResumedChoice] | None = None
        self.keep_whole = False
        """Set when the split cannot be done for this prompt: one engine then answers, or says what is wrong."""
        self.attempts = 0
        self.resumed = 0
        self.waited_s = 0.0
        self.queued_s = 0.0
        """In a prefill engine's queue; the decode engine tells of its own in its timings."""
        self.prefill_engine: str | None = None
        self.decode_engine: str | None = None
        self.split_begin: int | None = None
        self.split_end: int | None = None
        self.transferred_bytes: int | None = None
        self.transfer_failures = 0
        self.transfer_retries = 0
        self.prefill_s: float | None = None
        self.transfer_s: float | None = None
        self.reserving: asyncio.Future[PrepRecvAnswer] | None = None
        """The last reservation asked for. A client that leaves does not cancel it: an abort that overtook it on the way
        would find nothing to free, and the room would be lost until the reservation expires."""
        self._avoid: frozenset[str] = frozenset()
        self._touched: frozenset[str] = frozenset()
        self._leases: tuple[Lease | TransferSlot, ...] = ()
        self._turn = 0

    # steps for patterns

    async def tokenize(self) -> Prompt:
        """The prompt's token ids, made at most once per request."""
        if self.prompt is None:
            with self.span.step("tokenize") as step:
                self.prompt = await self.desk.tokens.encode(self.asked, self.desk.fleet, step.trace)
            self.prompt_tokens = self.prompt.tokens
        return self.prompt

    async def reserve(self, end: int) -> Reservation:
        """Room for `prompt[:end]` on the best decode engine that has some.

        While none has, waits in the router's bounded queue, before any prefill is spent; raises `ApiError` (429)
        when that is full or takes too long, `EngineUnreachable` when no engine is left.
        """
        waited = False
        while True:
            for engine_id in self.placement.decode:
                engine = self.desk.fleet.get(engine_id)
                reservation = await self._reserve_on(engine, end) if engine is not None else None
                if reservation is not None:
                    if waited:
                        self.desk.room.wake()  # there may be room for the next one as well
                    return reservation
            if not self.placement.decode:
                raise EngineUnreachable("no engine is left to decode on")
            await self.wait_for_room(self._lack(), first=waited)
            waited = True
            if self.plan.knobs.admission is Admission.QUEUE:
                await self.admit(waited)  # others may have been admitted meanwhile

    async def send_kv(self, reservation: Reservation) -> bool:
        """Prefill on the best prefill engine and move the KV into the reservation; false if D must recompute.

        A transfer that fails is tried once more into the same reservation, on the same engine or, if that died, on
        the next. The client only ever sees latency. Nothing is sent if the receiver already holds everything.
        """
        try:
            return reservation.begin >= reservation.end or await self._send(reservation)
        finally:
            reservation.slot.release()
            self.desk.room.wake()

    async def _send(self, reservation: Reservation) -> bool:
        engines = [each for each in self.placement.prefill if each != reservation.engine_id]
        for attempt in range(MAX_SENDS):
            engines = [each for each in engines if self.desk.fleet.get(each) is not None]
            if not engines:
                break
            self.transfer_retries += attempt
            try:
                await self._send_from(self.desk.fleet[engines[0]], reservation)
                return True
            except (TransferFailed, EngineUnreachable, Draining) as error:
                self.transfer_failures += 1
                self.log.warning("transfer_failed", engine=engines[0], error=error.for_logs)
                if not isinstance(error, TransferFailed | EngineTimeout):
                    engines.pop(0)
            except EngineError as error:
                self.transfer_failures += 1
                self.log.warning("transfer_refused", engine=engines[0], error=error.for_logs)
                break
        return False

    def generate(self, engine_id: str, begin: int = 0) -> Generate:
        return Generate(engine_id, begin)

    # for the router

    def replace(self) -> Placement:
        """Place the request on the loads of this moment, away from engines that failed it."""
        self._turn = self._turn or self._next_turn()
        request = self._placement_request()
        self.placement = place(self.plan, request, self.desk.fleet.views, self._turn)
        return self.placement

    async def admit(self, waited: bool = False) -> None:
        """Apply the plan's admission; raises `ApiError` for what is shed or cannot get in.

        Who has `waited` before waits on at the head of the queue.
        """
        if self.plan.knobs.admission is Admission.OFF:
            return
        while self.placement.decode:
            verdict = self._verdict()
            if verdict is Verdict.ADMIT:
                return
            if verdict is Verdict.SHED:
                sentence = f"overloaded: this request could not meet its TTFT bound of {self.slo.ttft_ms:g} ms"
                raise ApiError(429, sentence, code="shed", retry_after_s=1)
            await self.wait_for_room(Lack.ADMISSION, first=waited)
            waited = True

    async def wait_for_room(self, lack: Lack, *, first: bool) -> None:
        """Wait in the router's queue, then place again."""
        began_s = self.desk.now_s()
        try:
            with self.span.step(f"wait for {lack.value}"):
                await self.desk.room.wait(self.desk.limits.queue_s - self.waited_s, lack, first=first)
        except (QueueFull, TimeoutError):
            raise ApiError(429, "no room: try again later", code="no_room", retry_after_s=1) from None
        finally:
            self.waited_s += self.desk.now_s() - began_s
        self.replace()

    def hold(self, engine: Engine, prefill_tokens: int) -> Lease:
        """Count this request on an engine until `release`."""
        lease = Lease(engine, prefill_tokens)
        self._leases += (lease,)
        self._touched |= {engine.engine_id}
        return lease

    def done_with(self, engine_id: str) -> None:
        """The engine has answered: it holds nothing for this request any more."""
        self._touched -= {engine_id}

    def avoid(self, engine_id: str) -> None:
        self._avoid |= {engine_id}

    def release(self) -> None:
        """Give every lease back and let a waiting request try; safe to call more than once."""
        for lease in self._leases:
            lease.release()
        self._leases = ()
        self.desk.room.wake()

    @property
    def ids(self) -> dict[str, str]:
        """What every log line about it names: the request and, where it has one, its trace."""
        trace = self.span.trace
        trace_id = trace.trace_id if trace is not None else None
        return {"request_id": self.request_id} | ({"trace_id": trace_id} if trace_id is not None else {})

    @property
    def log(self) -> FilteringBoundLogger:
        bound: FilteringBoundLogger = log.bind(**self.ids)
        return bound

    @property
    def touched(self) -> frozenset[str]:
        """Engines that may still hold something for this request, because a step on them did not end cleanly."""
        return self._touched

    # inside

    async def _reserve_on(self, engine: Engine, end: int) -> Reservation | None:
        """A reservation on this engine, or `None` if it has no room, no transfer slot or no answer."""
        if engine.own_transfers >= self.plan.knobs.max_inflight_transfers:
            return None
        slot = TransferSlot(engine)
        self._leases += (slot,)
        self._touched |= {engine.engine_id}
        prompt = await self.tokenize()
        try:
            with self.span.call("prep_recv", engine.engine_id) as step:
                asking = engine.client.prep_recv(self.request_id, prompt, end, RESERVATION_TTL_S, step.trace)
                self.reserving = asyncio.ensure_future(asking)
                answer = await asyncio.shield(self.reserving)
        except EngineError as error:
            slot.release()
            self._unreserved(engine, error)
            return None
        begin = answer.prefix_matched_length
        self.split_begin, self.split_end = begin, end
        return Reservation(engine.engine_id, answer.kv_addr_info, begin, end, slot)

    def _lack(self) -> Lack:
        """What keeps the request from its best decode engine."""
        engine = self.desk.fleet.get(self.placement.decode[0])
        busy = engine is not None and engine.own_transfers >= self.plan.knobs.max_inflight_transfers
        return Lack.TRANSFER_SLOT if busy else Lack.KV_ROOM

    def _unreserved(self, engine: Engine, error: EngineError) -> None:
        """Go on to the next engine if this one is full or gone; anything else is about the request itself."""
        if isinstance(error, EngineUnreachable):
            engine.failed()
            self.avoid(engine.engine_id)
            return
        self.done_with(engine.engine_id)
        if not isinstance(error, NoKvRoom | Draining):
            raise error

    def _verdict(self) -> Verdict:
        decode = self.desk.fleet.get(self.placement.decode[0])
        prefill = self.desk.fleet.get(self.placement.prefill[0]) if self.placement.is_split else decode
        if decode is None or prefill is None:
            return Verdict.ADMIT  # it left this very moment; the pattern will find another
        return admit(self.plan, self.slo, self._placement_request(), decode.view, prefill.view)

    async def _send_from(self, sender: Engine, reservation: Reservation) -> None:
        prompt = await self.tokenize()
        begin, end = reservation.begin, reservation.end
        lease = self.hold(sender, end - begin)
        try:
            with self.span.call("remote_send", sender.engine_id) as step:
                answer = await sender.client.remote_send(
                    self.request_id, prompt, reservation.kv_addr_info, begin, end, step.trace
                )
        except EngineTimeout:
            await self._abort_on(sender)
            raise
        except EngineUnreachable:
            sender.failed()
            raise
        except EngineError:
            self.done_with(sender.engine_id)
            raise
        finally:
            lease.release()
        self.done_with(sender.engine_id)
        self.prefill_engine = sender.engine_id
        self.transferred_bytes = answer.bytes
        self.queued_s, self.transfer_s = answer.queue_s, answer.transfer_s
        self.prefill_s = answer.prefill_s - answer.queue_s
        self.desk.prefixes.add(self.hashes, sender.engine_id)

    async def _abort_on(self, engine: Engine) -> None:
        """Stop what is left of a step that took too long, so that the next try does not queue behind it."""
        with contextlib.suppress(EngineError), self.span.call("abort", engine.engine_id) as step:
            await engine.client.abort(self.request_id, step.trace)

    def _placement_request(self) -> PlacementRequest:
        splittable = self.prompt is not None and not self.keep_whole
        return PlacementRequest(self.prompt_tokens, self._cached_tokens(), self._avoid, splittable)

    def _cached_tokens(self) -> dict[str, int]:
        """The index knows blocks of bytes; spread the prompt's tokens evenly over its bytes."""
        if not self.hashes:
            return {}
        per_block = self.prompt_tokens * BLOCK_BYTES / max(1, len(self.asked.content))
        return {engine_id: int(n * per_block) for engine_id, n in self.desk.prefixes.match(self.hashes).items()}

    def _next_turn(self) -> int:
        self.desk.turn += 1
        return self.desk.turn
