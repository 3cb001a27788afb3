"""SGLang's scheduler and the network as the plugin's part in the scheduler process needs them. No SGLang in here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.protocol import Config
from engines.sglang.reservations import KvCache
from engines.sglang.slots import Rows
from engines.sglang.wire import Buffer, Note, Peer
from engines.types import KvLayout


@dataclass(frozen=True, slots=True)
class Loads:
    running: int
    queued: int
    pending_prefill_tokens: int
    outside_cache_tokens: int
    """Slots that are neither free nor evictable, reservations among them."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What one pass computed of one prompt: its tokens `[begin, to)`."""

    rid: str
    begin: int
    to: int
    through: bool
    """Its prompt is complete now."""
    aborted: bool
    cached_tokens: int
    request: Any


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass whose results were processed. Times are on the scheduler's clock."""

    launched_s: float
    ended_s: float
    prefills: Sequence[Computed]
    decode_batch: int
    kv_tokens: int
    queued: int
    """Prompts that waited for this pass: still in the queue, or begun and none of its business."""
    finished: int
    """Requests that ended with it."""


class View(KvCache, Protocol):
    """SGLang's scheduler as this module needs it."""

    page_size: int
    bytes_per_token: int
    capacity_tokens: int
    context_length_tokens: int
    vocab_size: int
    device: str
    memory: str
    device_id: int
    layout: KvLayout
    buffers: tuple[Buffer, ...]

    def rows(self, slots: Rows) -> Rows: ...
    def checksum(self, slots: Rows) -> int: ...
    def request_slots(self, request: Any, begin: int, to: int) -> Rows: ...
    def request_ids(self, request: Any, to: int) -> bytes: ...
    def path_slots(self, node: Any) -> Rows: ...
    def spare_tokens(self) -> int: ...
    def loads(self) -> Loads: ...
    def knobs(self) -> Config: ...
    def set_knobs(self, wanted: Config) -> None: ...
    def report(self, payload: bytes) -> None: ...


class Transport(Protocol):
    @property
    def metadata(self) -> bytes: ...
    def add_peer(self, peer: Peer) -> None: ...
    def knows(self, agent: str) -> bool: ...
    def forget(self, agent: str) -> None: ...
    def earlier_lives(self, agent: str) -> Sequence[str]: ...
    def notify(self, agent: str, note: Note) -> None: ...
    def take_notes(self) -> Iterator[tuple[str, bytes]]: ...
    def write(self, agent: str, mine: Rows, theirs: Rows, note: bytes | None) -> Any: ...
    def is_done(self, handle: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Identity:
    engine_id: str
    kind: str
    agent: str
    epoch: str
    transports: tuple[str, ...]
