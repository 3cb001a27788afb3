"""The emulated engine behind its HTTP face: the verbs as methods on the kernel, its driver and its transfers."""

import asyncio
import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engines.abortable import Abortable
from engines.emulated.choice import Choice, make_choices
from engines.emulated.driver import Driver
from engines.emulated.events import Event, Finished, Pass, Prefilled, Token
from engines.emulated.generation import Answer, Generation
from engines.emulated.kernel import Kernel
from engines.emulated.kv_address import KvAddress, decode_address
from engines.emulated.kv_receiver import KvReceiver
from engines.emulated.kv_sender import check_layouts, send_kv
from engines.emulated.language import Language
from engines.emulated.openai import Ask, Limits
from engines.emulated.shared_link import SharedLink
from engines.errors import BadRequest, Draining, ReservationGone
from engines.metrics import Counters
from engines.prefill_rate import PrefillRate
from engines.protocol import Config, PrepRecv, PrepRecvAnswer, RemoteSend, RemoteSendAnswer, ResumedChoice
from engines.records import PassRecord, TransferRecord
from engines.sampling import PassSample
from engines.telemetry import Recorder
from engines.tokenizer import Tokenizer
from engines.types import EngineInfo, EngineLoad, EngineTimings

MAX_TRANSFER_S = 600.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """`monotonic` runs everything; `wall` is only for what leaves the process."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]


class Engine:
    """Wires kernel, driver, language and transfers. `run` drives it; everything else returns or waits on that.

    Single-threaded: all methods belong to one event loop. Raises `engines.errors`.
    """

    def __init__(
        self,
        kernel: Kernel,
        info: EngineInfo,
        kv_address: str,
        tokenizer: Tokenizer,
        language: Language,
        link: SharedLink,
        clocks: Clocks,
        recorder: Recorder,
        default_max_tokens: int,
        transfer_stall_s: float,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.language = language
        self.counters = Counters()
        self.clocks = clocks
        self.limits = Limits(
            model=info.model,
            context_tokens=min(info.context_length_tokens, info.kv_capacity_tokens),
            default_max_tokens=default_max_tokens,
            vocab_size=tokenizer.vocab_size,
            max_token_bytes=tokenizer.max_token_bytes,
        )
        self._kernel = kernel
        self._kv_address = kv_address
        self._recorder = recorder
        self._sample = PassSample()
        self._prefill_rate = PrefillRate()
        self._stall_s = transfer_stall_s
        self._driver = Driver(kernel, clocks.monotonic, self._on_event, self._on_pass)
        self.receiver = KvReceiver(
            kernel,
            link,
            info.kv_layout,
            info.epoch,
            clocks.monotonic,
            self.counters,
            self._on_received,
            transfer_stall_s,
        )
        self._draining = False
        self._serial = itertools.count(1)
        self._choices: dict[str, tuple[Generation, Choice]] = {}
        self._generations: dict[str, set[Generation]] = {}
        self._prefills: dict[str, asyncio.Future[Prefilled]] = {}
        self._sends: Abortable[RemoteSendAnswer] = Abortable()

    async def run(self) -> None:
        """Drive passes until cancelled."""
        await self._driver.run()

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def busy(self) -> bool:
        """Whether anything that a client waits for is under way."""
        return bool(self._generations or len(self._sends) or self.receiver.active)

    def load(self) -> EngineLoad:
        self._expire()
        return msgspec.structs.replace(
            self._kernel.load(),
            inbound_transfers=self.receiver.active,
            draining=self._draining,
            prefill_tokens_per_s=self._prefill_rate.tokens_per_s,
        )

    def drain(self, on: bool) -> None:
        """Refuse new work, or take it again. What runs is finished; unused reservations are given up at once."""
        self._draining = on
        if on:
            self.receiver.close_all()
            # Only to have the reservations released: the kernel itself must go on taking the further choices of
            # requests that run already, so refusing is this class's business.
            self._kernel.set_draining(True)
            self._kernel.set_draining(False)
        self._driver.wake()

    def config(self, wanted: Config) -> Config:
        return self._kernel.config(wanted)

    def prep_recv(self, call: PrepRecv) -> PrepRecvAnswer:
        self._check_takes_work()
        self._expire()
        prompt = self._tokens(call.prompt)
        now_s = self.clocks.monotonic()
        self.receiver.close(call.request_id)
        reservation = self._kernel.reserve(call.request_id, prompt, call.end, call.ttl_s, now_s)
        nonce = self.receiver.open(reservation)
        self._driver.wake()
        address = KvAddress(
            address=self._kv_address,
            engine_id=self.info.engine_id,
            epoch=self.info.epoch,
            request_id=call.request_id,
            nonce=nonce,
            begin=reservation.begin,
            end=reservation.end,
            layout=self.info.kv_layout,
            expires_at_s=self.clocks.wall() + call.ttl_s,
        )
        return PrepRecvAnswer(kv_addr_info=address.encode(), prefix_matched_length=reservation.begin)

    async def remote_send(self, call: RemoteSend) -> RemoteSendAnswer:
        """Cancelling it frees what it holds; so does `abort`, and it then raises `BadRequest`."""
        self._check_takes_work()
        address = self._checked_address(call)
        return await self._sends.run(call.request_id, self._send(call, address))

    def generate(
        self,
        ask: Ask,
        request_id: str,
        answer: Answer,
        given_prompt: list[int] | None = None,
        resume: list[ResumedChoice] | None = None,
    ) -> Generation:
        """Start a generation that feeds `answer`; the caller aborts it if its client leaves."""
        self._check_takes_work()
        agree = self._compare(ask, request_id, given_prompt)
        choices = make_choices(ask, f"{request_id}.{next(self._serial)}", resume, self.tokenizer)
        generation = Generation(ask, request_id, choices, self.language, self, answer, self._on_end, agree)
        self._generations.setdefault(request_id, set()).add(generation)
        try:
            generation.start()
        except BaseException:  # it has not begun, so nothing else will ever take it off the list
            self._on_end(generation)
            raise
        return generation

    def abort(self, request_id: str) -> None:
        """Free whatever there is under this id: generations, sends, a reservation."""
        generations = list(self._generations.get(request_id, ()))
        sends = self._sends.abort(request_id)
        for generation in generations:
            generation.abort()
        self.receiver.close(request_id)
        if self._kernel.release(request_id, self.clocks.monotonic()) or generations or sends:
            self.counters.aborts += 1
        self._driver.wake()

    def leave(self, generation: Generation) -> None:
        """The client of one generation is gone."""
        generation.abort()
        self.counters.aborts += 1
        self._driver.wake()

    # What a Generation asks of its engine.

    def submit(self, generation: Generation, choice: Choice) -> None:
        self._kernel.submit_generation(
            choice.kernel_id,
            choice.prompt,
            choice.max_new_tokens,
            self.clocks.monotonic(),
            group=generation.request_id,
        )
        self._choices[choice.kernel_id] = (generation, choice)
        self._driver.wake()

    def finish(self, choice: Choice, at_s: float) -> EngineTimings | None:
        timings = self._kernel.finish(choice.kernel_id, at_s)
        if timings is not None:
            self._choices.pop(choice.kernel_id, None)
        return timings

    def abort_choice(self, choice: Choice) -> None:
        self._kernel.abort(choice.kernel_id, self.clocks.monotonic())
        self._choices.pop(choice.kernel_id, None)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Token):
            self.counters.output_tokens += 1
            found = self._choices.get(event.request_id)
            if found is not None:
                found[0].on_token(found[1], event.token, event.at_s)
        elif isinstance(event, Finished):
            found = self._choices.pop(event.request_id, None)
            if found is not None:
                found[0].on_finished(found[1], event.timings)
        else:
            self._on_prefilled(event)

    def _on_prefilled(self, event: Prefilled) -> None:
        waiting = self._prefills.get(event.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    def _on_pass(self, ended: Pass, end_s: float) -> None:
        self.counters.passed(ended.duration_s, ended.prefill_tokens)
        self._prefill_rate.on_pass(ended.prefill_tokens, ended.duration_s, ended.queued)
        if self._sample.wants(ended.prefill_tokens, end_s - ended.duration_s):
            self._recorder.add_pass(self._pass_record(ended, end_s))

    def _pass_record(self, ended: Pass, end_s: float) -> PassRecord:
        return PassRecord(
            engine_id=self.info.engine_id,
            kind=self.info.kind,
            at_s=self.clocks.wall() + end_s - self.clocks.monotonic(),
            wall_s=ended.duration_s,
            prefill_tokens=ended.prefill_tokens,
            prefill_context_tokens=ended.prefill_context_tokens,
            decode_batch=ended.decode_batch,
            kv_tokens=ended.kv_tokens,
            queued=ended.queued,
        )

    def _on_received(self, wall_s: float, nbytes: int, concurrent: int) -> None:
        self._driver.wake()
        self._recorder.add_transfer(
            TransferRecord(
                engine_id=self.info.engine_id,
                kind=self.info.kind,
                at_s=self.clocks.wall(),
                wall_s=wall_s,
                bytes=nbytes,
                concurrent=concurrent,
            )
        )

    def _on_end(self, generation: Generation) -> None:
        same_id = self._generations.get(generation.request_id)
        if same_id is not None:
            same_id.discard(generation)
            if not same_id:
                del self._generations[generation.request_id]

    async def _send(self, call: RemoteSend, address: KvAddress) -> RemoteSendAnswer:
        job_id = f"{call.request_id}.{next(self._serial)}"
        prompt = self._tokens(call.prompt)
        try:
            prefilled = await self._prefill(job_id, prompt, call.end)
            begun_s = self.clocks.monotonic()
            await send_kv(address, prompt, self._stall_s, MAX_TRANSFER_S)
        finally:
            self._prefills.pop(job_id, None)
            self._kernel.release_prefill(job_id, self.clocks.monotonic())
            self._driver.wake()
        return RemoteSendAnswer(
            cached_length=prefilled.cached_tokens,
            bytes=self.info.kv_layout.bytes_per_token * (call.end - call.begin),
            prefill_s=max(0.0, prefilled.prefill_s),
            transfer_s=self.clocks.monotonic() - begun_s,
            queue_s=max(0.0, prefilled.queue_s),
        )

    async def _prefill(self, job_id: str, prompt: "array[int]", end: int) -> Prefilled:
        done: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        self._kernel.submit_prefill(job_id, prompt, end, self.clocks.monotonic())
        self._prefills[job_id] = done
        self._driver.wake()
        return await done

    def _checked_address(self, call: RemoteSend) -> KvAddress:
        """What can be told to be wrong before anything is computed."""
        address = decode_address(call.kv_addr_info)
        check_layouts(self.info.kv_layout, address.layout)
        if address.request_id != call.request_id:
            raise ReservationGone(f"the reservation is for request {address.request_id!r}, not {call.request_id!r}")
        if self.clocks.wall() >= address.expires_at_s:
            raise ReservationGone(f"the reservation for request {call.request_id!r} has expired")
        if (call.begin, call.end) != (address.begin, address.end):
            raise BadRequest(f"[{call.begin}, {call.end}) is not the reserved [{address.begin}, {address.end})")
        return address

    def _compare(self, ask: Ask, request_id: str, given: list[int] | None) -> bool | None:
        """Whether caller and engine tokenized alike. If not, the KV sent for the caller's tokens is not used."""
        if given is None or len(ask.prompts) != 1:
            return None
        agree = given == ask.prompts[0].tolist()
        if not agree:
            self.counters.token_mismatches += 1
            self.receiver.close(request_id)
            self._kernel.release(request_id, self.clocks.monotonic())
        return agree

    def _check_takes_work(self) -> None:
        if self._draining:
            raise Draining("this engine is draining: send new work elsewhere", retry_after_s=1.0)

    def _tokens(self, ids: list[int]) -> "array[int]":
        if ids and not 0 <= min(ids) <= max(ids) < self.limits.vocab_size:
            raise BadRequest(f"token ids must be 0 to {self.limits.vocab_size - 1}")
        return array("I", ids)

    def _expire(self) -> None:
        self.counters.expired_reservations += len(self._kernel.expire(self.clocks.monotonic()))
