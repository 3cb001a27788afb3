"""The engine as its HTTP process sees it: the verbs as methods, over the bridge to the scheduler. No SGLang in here."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
from structlog.contextvars import get_contextvars

from engines.errors import BadRequest, Draining, EngineTimeout
from engines.metrics import Counters
from engines.protocol import Config, PrepRecv, PrepRecvAnswer, StartGenerate
from engines.records import TransferRecord
from engines.sglang.bridge import Bridge
from engines.sglang.generate import Generation
from engines.sglang.knobs import check_knobs
from engines.sglang.messages import (
    RID_PREFIX,
    AddPeer,
    AllWritten,
    AskHeld,
    AskLoad,
    Claim,
    Describe,
    Description,
    Done,
    Event,
    LoadReport,
    Prefilled,
    Release,
    Replay,
    Reserve,
    Reserved,
    Sampled,
    SetDraining,
    SetKnobs,
    pack_tokens,
)
from engines.sglang.peers import Peers
from engines.sglang.reservations import CLAIM_S
from engines.sglang.sending import Sending
from engines.sglang.wire import KvHeld, Peer
from engines.telemetry import Recorder
from engines.types import EngineInfo, EngineLoad

Found = TypeVar("Found")
PATIENCE_S = 0.2
"""How long a question about the load waits for a scheduler that is in a pass; then the last known load is told."""


class Serving(Protocol):
    """What the engine needs of SGLang's HTTP process."""

    def encode(self, text: str) -> list[int]: ...
    def abort(self, rid: str) -> None: ...
    def prefill(self, rid: str, ids: list[int]) -> Any: ...


class Engine:
    """Belongs to one event loop. Raises `engines.errors`."""

    def __init__(
        self,
        serving: Serving,
        send: Callable[[bytes], None],
        recorder: Recorder,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._serving = serving
        self._recorder = recorder
        self._clock = clock
        self._wall = wall
        self._serial = itertools.count(1)
        self._generations: dict[str, set[Generation]] = {}
        self._by_rid: dict[str, Generation] = {}
        self._reserved: dict[str, float] = {}
        """Until when there may be a reservation, by request id: other generations need not ask the scheduler."""
        self.bridge = Bridge(send, self._on_event)
        self.counters = Counters()
        self.draining = False
        self.updated: Callable[[], None] = lambda: None
        """Called when the scheduler told new numbers."""
        self._load = EngineLoad()
        self._info: EngineInfo | None = None
        self._description: Description | None = None
        self._peers: Peers | None = None
        self._sending: Sending | None = None

    async def open(self, info_of: Callable[[Description], EngineInfo]) -> None:
        """Learn from the scheduler what this engine is; nothing works before."""
        self._description = await self.bridge.ask(Describe(call_id=self.bridge.new_id()), Description)
        self._info = info_of(self._description)
        self._peers = Peers(self._description.peer, self._introduce)
        self._sending = Sending(
            self.bridge,
            self._peers,
            self._serving.prefill,
            self._info.kv_layout,
            self.new_rid,
            self._clock,
            self._wall,
            self._on_transfer,
        )
        await self.load()

    async def aclose(self) -> None:
        if self._peers is not None:
            await self._peers.aclose()

    @property
    def info(self) -> EngineInfo:
        return _there(self._info)

    @property
    def me(self) -> Peer:
        return _there(self._description).peer

    @property
    def peers(self) -> Peers:
        return _there(self._peers)

    @property
    def sending(self) -> Sending:
        return _there(self._sending)

    def new_rid(self, request_id: str) -> str:
        """A name for a generation that is no other's beginning: SGLang aborts by prefix."""
        return f"{RID_PREFIX}{next(self._serial)}-{request_id}"

    def now_s(self) -> float:
        """Monotonic."""
        return self._clock()

    def check_takes_work(self) -> None:
        if self.draining:
            raise Draining("this engine is draining: send new work elsewhere", retry_after_s=1.0)

    def check_tokens(self, ids: list[int]) -> None:
        vocab_size = _there(self._description).vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise BadRequest(f"token ids must be 0 to {vocab_size - 1}")

    async def prep_recv(self, call: PrepRecv) -> PrepRecvAnswer:
        self.check_takes_work()
        self.check_tokens(call.prompt)
        length = len(call.prompt)
        end = call.end if call.end >= 0 else length + call.end
        if not 0 < end < length:
            raise BadRequest(f"end is {call.end}, but must lie within the prompt of {length} tokens")
        if call.ttl_s <= 0:
            raise BadRequest(f"ttl_s is {call.ttl_s}, but must be over 0")
        order = Reserve(
            call_id=self.bridge.new_id(),
            request_id=call.request_id,
            prompt=pack_tokens(call.prompt[:end]),
            end=end,
            ttl_s=call.ttl_s,
            trace_id=get_contextvars().get("trace_id"),
        )
        asked_s = self._clock()
        reserved = await self.bridge.ask(order, Reserved)
        self._remember(call.request_id, call.ttl_s)
        reserve_s = self._clock() - asked_s
        address = msgspec.structs.replace(reserved.address, url=self.info.url, reserve_s=reserve_s)
        return PrepRecvAnswer(kv_addr_info=address.encode(), prefix_matched_length=reserved.prefix_matched_length)

    async def check_held(self, asked: KvHeld) -> None:
        """Raises `ReservationGone`, or `TransferFailed` unless everything has arrived."""
        order = AskHeld(call_id=self.bridge.new_id(), request_id=asked.request_id, nonce=asked.nonce)
        await self.bridge.ask(order, Done)

    async def abort(self, request_id: str) -> None:
        """Free whatever there is under this id: generations, sends, a reservation."""
        generations = list(self._generations.get(request_id, ()))
        for generation in generations:
            self._abort(generation)
        if self.sending.abort(request_id) or generations:
            self.counters.aborts += 1
        await self.bridge.ask(Release(call_id=self.bridge.new_id(), request_id=request_id), Done)

    async def load(self) -> EngineLoad:
        """Of this moment, or of the last pass if the scheduler is in a long one."""
        try:
            ask = AskLoad(call_id=self.bridge.new_id())
            self._learn(await self.bridge.ask(ask, LoadReport, PATIENCE_S))
        except EngineTimeout:
            pass
        return self.last_load()

    def last_load(self) -> EngineLoad:
        return msgspec.structs.replace(self._load, draining=self.draining)

    async def config(self, wanted: Config) -> Config:
        check_knobs(wanted, self.info.kv_layout.page_size_tokens)
        order = SetKnobs(
            call_id=self.bridge.new_id(),
            chunked_prefill_tokens=wanted.chunked_prefill_tokens,
            prefill_decode_interval=wanted.prefill_decode_interval,
        )
        report = await self.bridge.ask(order, LoadReport)
        self._learn(report)
        return Config(
            chunked_prefill_tokens=report.load.chunked_prefill_tokens,
            prefill_decode_interval=report.load.prefill_decode_interval,
        )

    async def drain(self, on: bool) -> None:
        self.draining = on
        await self.bridge.ask(SetDraining(call_id=self.bridge.new_id(), on=on), Done)

    def begin_generation(self, call: StartGenerate, body: Any) -> Generation:
        """From now on an abort finds it; `end_generation` it in any case."""
        self.check_takes_work()
        rid = self.new_rid(call.request_id)
        generation = Generation(
            call,
            body,
            rid,
            self._clock,
            self._serving.encode,
            on_mismatch=lambda: self._on_mismatch(call.request_id),
            on_resumed=self._on_resumed,
        )
        self._generations.setdefault(call.request_id, set()).add(generation)
        self._by_rid[rid] = generation
        if call.request_id in self._reserved:
            self.bridge.tell(Claim(call_id=self.bridge.new_id(), request_id=call.request_id))
        return generation

    def end_generation(self, generation: Generation, *, left: bool) -> None:
        """`left`: the client went before the end."""
        request_id = generation.call.request_id
        if self._by_rid.pop(generation.rid, None) is None:
            return
        if left:
            self._abort(generation)
            self.counters.aborts += 1
        same_id = self._generations.get(request_id)
        if same_id is not None:
            same_id.discard(generation)
            if not same_id:
                del self._generations[request_id]
                self._release(request_id)

    def count_abort(self) -> None:
        """SGLang stopped a generation of its own endpoints early."""
        self.counters.aborts += 1

    def _abort(self, generation: Generation) -> None:
        for rid in generation.rids:
            self._serving.abort(rid)

    def _on_mismatch(self, request_id: str) -> None:
        self.counters.token_mismatches += 1
        self._release(request_id)

    def _on_resumed(self, rid: str, ids: list[int]) -> None:
        self.bridge.tell(Replay(call_id=self.bridge.new_id(), rid=rid, tokens=pack_tokens(ids)))

    def _remember(self, request_id: str, ttl_s: float) -> None:
        now_s = self._clock()
        for gone in [key for key, until_s in self._reserved.items() if until_s < now_s]:
            del self._reserved[gone]
        self._reserved[request_id] = now_s + ttl_s + CLAIM_S

    def _release(self, request_id: str) -> None:
        if self._reserved.pop(request_id, None) is not None:
            self.bridge.tell(Release(call_id=self.bridge.new_id(), request_id=request_id))

    async def _introduce(self, peer: Peer) -> None:
        await self.bridge.ask(AddPeer(call_id=self.bridge.new_id(), peer=peer), Done)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Prefilled):
            generation = self._by_rid.get(event.rid)
            if generation is not None:
                generation.on_prefilled(event)
        elif isinstance(event, Sampled):
            for record in event.passes:
                self._recorder.add_pass(record)
            self._learn(event)
        elif isinstance(event, AllWritten):
            self.sending.on_written(event)

    def _on_transfer(self, wall_s: float, nbytes: int, concurrent: int) -> None:
        self._recorder.add_transfer(
            TransferRecord(
                engine_id=self.info.engine_id,
                kind=self.info.kind,
                at_s=self._wall(),
                wall_s=wall_s,
                bytes=nbytes,
                concurrent=concurrent,
            )
        )

    def _learn(self, told: LoadReport | Sampled) -> None:
        self._load = told.load
        counted = msgspec.structs.asdict(told.totals)
        counted["transfers"] = Counter(counted["transfers"])
        for name, value in counted.items():
            setattr(self.counters, name, value)
        self.updated()


def _there(found: Found | None) -> Found:
    if found is None:
        raise Draining("this engine is still starting", retry_after_s=1.0)
    return found
