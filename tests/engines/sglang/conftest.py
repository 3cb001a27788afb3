"""An engine of the SGLang plugin without SGLang: a context cache and a KV pool in plain memory, a network of calls."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash

from engines.errors import TransferFailed
from engines.protocol import Config
from engines.sglang.messages import AnyReport, decode_report, encode, pack_tokens
from engines.sglang.scheduler import Handler
from engines.sglang.view import Computed, Identity, Loads, Pass
from engines.sglang.wire import Buffer, Note, Peer, encode_note
from engines.types import KvLayout

TOKEN = 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


class Cache:
    """A context cache that knows every cached prefix by its ids, over `capacity` slots."""

    def __init__(self, capacity: int, page_size: int = 1) -> None:
        self.page_size = page_size
        self.capacity = capacity
        self.free_slots = set(range(capacity))
        self.cached: dict[bytes, int] = {}
        self.locks: Counter[bytes] = Counter()

    def match(self, ids: bytes) -> tuple[int, bytes]:
        length = 0
        while length < len(ids) // TOKEN and ids[: (length + 1) * TOKEN] in self.cached:
            length += 1
        length -= length % self.page_size
        return length, ids[: length * TOKEN]

    def lock(self, node: bytes) -> bytes:
        self.locks[node] += 1
        return node

    def unlock(self, lock: bytes | None) -> None:
        if lock is None:
            return
        assert self.locks[lock] > 0, "unlocked twice"
        self.locks[lock] -= 1

    def evict(self, tokens: int) -> None:
        for prefix in sorted(self.cached, key=len, reverse=True):
            if len(self.free_slots) >= tokens:
                return
            if not any(count and held.startswith(prefix) for held, count in self.locks.items()):
                self.free_slots.add(self.cached.pop(prefix))

    def allocate(self, tokens: int, spare_tokens: int) -> Any:
        self.evict(tokens + spare_tokens)
        if len(self.free_slots) < tokens + spare_tokens:
            return None
        slots = sorted(self.free_slots)[:tokens]
        self.free_slots -= set(slots)
        return np.array(slots, dtype=np.int64)

    def free(self, slots: Any) -> None:
        given = set(slots.tolist())
        assert not given & self.free_slots, "freed twice"
        self.free_slots |= given

    def insert(self, ids: bytes, matched: int, node: bytes, slots: Any) -> bytes:
        for at, slot in enumerate(slots.tolist(), start=matched + 1):
            prefix = ids[: at * TOKEN]
            if prefix in self.cached:
                self.free_slots.add(slot)
            else:
                self.cached[prefix] = slot
        return ids

    @property
    def held(self) -> int:
        """Slots that are neither free nor cached."""
        return self.capacity - len(self.free_slots) - len(self.cached)


class View(Cache):
    """A scheduler whose pool is real memory: two buffers of 8 bytes a token."""

    def __init__(self, capacity: int = 64, page_size: int = 1, model: str = "m") -> None:
        super().__init__(capacity, page_size)
        self.memory_of = [np.zeros((capacity // page_size, page_size * 8), dtype=np.uint8) for _ in range(2)]
        self.buffers = tuple(Buffer(m.ctypes.data, page_size * 8, capacity // page_size) for m in self.memory_of)
        self.bytes_per_token = 16
        self.capacity_tokens = capacity
        self.context_length_tokens = 1000
        self.vocab_size = 1000
        self.device, self.memory, self.device_id = "cpu", "DRAM", 0
        self.layout = KvLayout(
            model=model, dtype="bfloat16", layers=1, kv_heads=1, head_dim=4, page_size_tokens=page_size
        )
        self.reports: list[AnyReport] = []
        self.on_report: Callable[[bytes], None] = lambda payload: self.reports.append(decode_report(payload))
        self.knob = Config(chunked_prefill_tokens=64, prefill_decode_interval=0)

    def rows(self, slots: Any) -> Any:
        return slots if self.page_size == 1 else slots[:: self.page_size] // self.page_size

    def checksum(self, slots: Any) -> int:
        digest = xxhash.xxh3_64()
        for memory in self.memory_of:
            digest.update(np.ascontiguousarray(memory[self.rows(slots)]))
        return digest.intdigest()

    def request_slots(self, request: "Request", begin: int, to: int) -> Any:
        return request.slots[begin:to]

    def request_ids(self, request: "Request", to: int) -> bytes:
        return request.ids[: to * TOKEN]

    def path_slots(self, node: bytes) -> Any:
        return np.array([self.cached[node[: at * TOKEN]] for at in range(1, len(node) // TOKEN + 1)], dtype=np.int64)

    def spare_tokens(self) -> int:
        return 0

    def loads(self) -> Loads:
        return Loads(running=0, queued=0, pending_prefill_tokens=0, outside_cache_tokens=self.held)

    def knobs(self) -> Config:
        return self.knob

    def set_knobs(self, wanted: Config) -> None:
        self.knob = Config(
            chunked_prefill_tokens=wanted.chunked_prefill_tokens or self.knob.chunked_prefill_tokens,
            prefill_decode_interval=wanted.prefill_decode_interval
            if wanted.prefill_decode_interval is not None
            else self.knob.prefill_decode_interval,
        )

    def report(self, payload: bytes) -> None:
        self.on_report(payload)

    def kv(self, ids: bytes) -> list[bytes]:
        """The cached KV of a prompt, for comparison with another engine's."""
        slots = self.path_slots(ids)
        return [m.reshape(-1, 8)[slots].tobytes() for m in self.memory_of]


@dataclass
class Request:
    """A generation that computes a prompt: its KV is a function of the token ids before each slot."""

    rid: str
    ids: bytes
    slots: Any
    reused: int

    def compute(self, view: View, begin: int, to: int) -> None:
        for at in range(begin, to):
            for number, memory in enumerate(view.memory_of):
                word = xxhash.xxh64_digest(self.ids[: (at + 1) * TOKEN], seed=number)
                memory.reshape(-1, 8)[self.slots[at]] = np.frombuffer(word, dtype=np.uint8)


@dataclass
class Network:
    """Connects engines by name. Writes can be held up, harmed, or broken."""

    views: dict[str, View] = field(default_factory=dict)
    notes: dict[str, deque[tuple[str, bytes]]] = field(default_factory=dict)
    slow: bool = False
    """Writes only begin, and are through once this is off."""
    corrupt: bool = False
    dead: set[str] = field(default_factory=set)
    writes: int = 0

    def join(self, name: str, view: View) -> "Transport":
        self.views[name] = view
        self.notes[name] = deque()
        return Transport(self, name)


class Transport:
    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._name = name
        self.metadata = name.encode()
        self.known: set[str] = set()

    def add_peer(self, peer: Peer) -> None:
        self.known.add(peer.agent)

    def knows(self, agent: str) -> bool:
        return agent in self.known

    def forget(self, agent: str) -> None:
        self.known.discard(agent)

    def earlier_lives(self, agent: str) -> list[str]:
        return []

    def notify(self, agent: str, note: Note) -> None:
        self.deliver(agent, encode_note(note))

    def deliver(self, agent: str, raw: bytes) -> None:
        if agent not in self._network.dead:
            self._network.notes[agent].append((self._name, raw))

    def take_notes(self) -> Iterator[tuple[str, bytes]]:
        inbox = self._network.notes[self._name]
        while inbox:
            yield inbox.popleft()

    def write(self, agent: str, mine: Any, theirs: Any, note: bytes | None) -> Any:
        if agent in self._network.dead:
            raise TransferFailed("the receiver is gone")
        self._network.writes += 1
        source, target = self._network.views[self._name], self._network.views[agent]
        for ours, its in zip(source.memory_of, target.memory_of, strict=True):
            its[theirs] = ours[mine]
        if self._network.corrupt:
            target.memory_of[0][theirs[0]] ^= 1
        return [agent, note]

    def is_done(self, handle: Any) -> bool:
        if self._network.slow:
            return False
        agent, note = handle
        if note is not None:
            self.deliver(agent, note)
        handle[1] = None
        return True


class Engine:
    """A handler over a view, driven by hand."""

    def __init__(self, name: str, network: Network, clock: Clock, view: View, *, with_checksums: bool = False) -> None:
        self.name = name
        self.view = view
        self.transport = network.join(name, view)
        numbers = iter(range(10**6))
        self.handler = Handler(
            view,
            self.transport,
            Identity(engine_id=name, kind="k", agent=name, epoch=f"{name}-1", transports=("memory",)),
            clock=clock,
            wall=clock,
            new_nonce=lambda: f"n{next(numbers)}",
            stall_s=10.0,
            with_checksums=with_checksums,
        )
        self._clock = clock
        self._numbers = iter(range(1, 10**6))

    def tell(self, kind: Any, **fields: Any) -> int:
        call_id = next(self._numbers)
        self.handler.on_call(encode(kind(call_id=call_id, **fields)))
        return call_id

    def ask(self, kind: Any, **fields: Any) -> Any:
        """The answer to a call that is answered at once."""
        call_id = self.tell(kind, **fields)
        return self.answer(call_id)

    def answer(self, call_id: int) -> Any:
        found = [report for report in self.view.reports if getattr(report, "call_id", None) == call_id]
        return found[0] if found else None

    def prefill(self, rid: str, ids: bytes, chunk: int | None = None, *, abort: bool = False) -> Iterator[None]:
        """Run a generation's prompt through, yielding between two passes as SGLang's loop does."""
        total = len(ids) // TOKEN
        self.handler.on_arrival(rid)
        reused, node = self.view.match(ids[: (total - 1) * TOKEN])
        lock = self.view.lock(node)
        slots = self.view.allocate(total - reused, 0)
        path = np.concatenate([self.view.path_slots(node), slots])
        request = Request(rid, ids, path, reused)
        at = reused
        while at < total:
            to = total if chunk is None else min(total, at + chunk)
            request.compute(self.view, at, to)
            began_s = self._clock()
            self._clock.pass_by(0.1)
            if to == total:
                end = self.view.insert(ids, reused, node, slots)
                self.view.unlock(lock)
                request.slots = self.view.path_slots(end)
            else:
                self.handler.on_stashed(rid, to, request)
            done = Computed(rid, at, to, through=to == total, aborted=abort, cached_tokens=reused, request=request)
            self.handler.on_pass(Pass(began_s, self._clock(), [done], 0, 0, 0, int(to == total)))
            at = to
            yield


def settle(*engines: Engine, rounds: int = 6) -> None:
    for _ in range(rounds):
        for engine in engines:
            engine.handler.poll(busy=False)


@dataclass
class Pair:
    """Two engines that know each other."""

    sender: Engine
    receiver: Engine
    network: Network
    clock: Clock

    def settle(self) -> None:
        settle(self.sender, self.receiver)


@pytest.fixture(name="settle")
def settle_fixture() -> Callable[..., None]:
    return settle


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    def make(page_size: int = 1, *, with_checksums: bool = False, models: tuple[str, str] = ("m", "m")) -> Pair:
        network, clock = Network(), Clock()
        engines = [
            Engine(name, network, clock, View(page_size=page_size, model=model), with_checksums=with_checksums)
            for name, model in zip(("s", "r"), models, strict=True)
        ]
        for engine in engines:
            engine.transport.known |= {"s", "r"}
        return Pair(*engines, network, clock)

    return make


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()


@pytest.fixture
def cache() -> Callable[..., Cache]:
    return Cache


@pytest.fixture
def view() -> Callable[..., View]:
    return View


@pytest.fixture
def ids() -> Callable[..., bytes]:
    """Packed token ids `start`, `start + 1`, …"""
    return lambda count, start=0: pack_tokens(range(start, start + count))
