"""Room promised to KV that is on its way: who may write where, until when. No SGLang in here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engines.errors import BadRequest, NoKvRoom, ReservationGone, TransferFailed
from engines.sglang.slots import Rows

CLAIM_S = 60.0
"""How long a generation that waits for its turn keeps what was received for it."""
GRACE_S = 1.0
"""Between the last moment at which a write may begin and the end of the reservation, or a tenth of its time."""


class KvCache(Protocol):
    """The engine's context cache and its pool of KV slots, one slot a token.

    Ids are 32-bit integers as bytes. Lengths are multiples of the page size.
    """

    def match(self, ids: bytes) -> tuple[int, Any]:
        """The length of the longest cached prefix, and where it ends."""
        ...

    def lock(self, node: Any) -> Any:
        """Keep a prefix from being evicted; `unlock` what this returns."""
        ...

    def unlock(self, lock: Any) -> None: ...

    def allocate(self, tokens: int, spare_tokens: int) -> Rows | None:
        """Slots, evicting what is not locked; `None` if fewer than `spare_tokens` would stay available."""
        ...

    def free(self, slots: Rows) -> None: ...

    def insert(self, ids: bytes, matched: int, node: Any, slots: Rows) -> Any:
        """Cache `ids`, whose first `matched` tokens end at `node`, the rest in `slots`, which is the cache's then.

        Returns where it ends.
        """
        ...


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the KV of tokens `[matched, stored_end)`, with the cached prefix before it locked."""

    request_id: str
    nonce: str
    ids: bytes
    """The prompt up to `stored_end`."""
    matched: int
    end: int
    stored_end: int
    expires_at_s: float
    node: Any
    lock: Any
    slots: Rows | None
    """`None` once the cache owns them."""
    ttl_s: float
    claimed: bool = False
    sender: tuple[str, str] | None = None
    """Agent and `send_id` of who may write now. While there is one, the slots serve nothing else."""
    begun_s: float = 0.0
    """When that sender was let in."""
    trace_id: str | None = None
    """Of the request, for logs."""

    @property
    def received(self) -> bool:
        return self.slots is None

    @property
    def tokens(self) -> int:
        """Slots held."""
        return 0 if self.slots is None else len(self.slots)

    def expired(self, now_s: float) -> bool:
        return now_s >= self.expires_at_s

    def write_for_s(self, now_s: float) -> float:
        """How long writes may begin from now on, so that none is under way when the time is over."""
        left_s = max(0.0, self.expires_at_s - now_s)
        return left_s - min(GRACE_S, 0.1 * left_s)


OnStop = Callable[[Reservation], None]
"""Tell the sender of a reservation that it must stop."""


class Reservations:
    """All reservations of an engine by request id, and the slots of given-up ones that are still being written."""

    def __init__(self, cache: KvCache, on_stop: OnStop, new_nonce: Callable[[], str]) -> None:
        self._cache = cache
        self._on_stop = on_stop
        self._new_nonce = new_nonce
        self._by_id: dict[str, Reservation] = {}
        self._stopping: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_id) + len(self._stopping)

    @property
    def tokens(self) -> int:
        """Slots that are neither free nor in the cache."""
        everywhere = (*self._by_id.values(), *self._stopping.values())
        return sum(reservation.tokens for reservation in everywhere)

    @property
    def writing(self) -> int:
        """Transfers under way."""
        return sum(found.sender is not None for found in self._by_id.values()) + len(self._stopping)

    def open(
        self, request_id: str, ids: bytes, end: int, stored_end: int, ttl_s: float, now_s: float, spare_tokens: int
    ) -> Reservation:
        """Reserve, giving up an older reservation of the id. Raises `BadRequest`, `NoKvRoom`."""
        self._give_up_older(request_id)
        matched, node = self._cache.match(ids)
        lock = self._cache.lock(node)
        needed = stored_end - matched
        slots = self._cache.allocate(needed, spare_tokens) if needed else None
        if needed and slots is None:
            self._cache.unlock(lock)
            raise NoKvRoom(f"no room for {needed} tokens of KV now", retry_after_s=1.0)
        reservation = Reservation(
            request_id=request_id,
            nonce=self._new_nonce(),
            ids=ids,
            matched=matched,
            end=end,
            stored_end=stored_end,
            expires_at_s=now_s + ttl_s,
            node=node,
            lock=lock,
            slots=slots,
            ttl_s=ttl_s,
        )
        self._by_id[request_id] = reservation
        return reservation

    def find(self, request_id: str, nonce: str, now_s: float) -> Reservation:
        """Raises `ReservationGone`."""
        reservation = self._by_id.get(request_id)
        if reservation is None or reservation.nonce != nonce:
            raise ReservationGone(f"there is no such reservation for request {request_id!r}")
        if reservation.expired(now_s):
            raise ReservationGone(f"the reservation for request {request_id!r} has expired")
        return reservation

    def trace_id(self, request_id: str | None) -> str | None:
        """The trace that a request with a reservation belongs to, if it has one."""
        reservation = self._by_id.get(request_id) if request_id is not None else None
        return None if reservation is None else reservation.trace_id

    def begin_write(self, reservation: Reservation, agent: str, send_id: str, now_s: float) -> None:
        """From now on that sender may write. Raises `TransferFailed` if another does."""
        if reservation.sender not in (None, (agent, send_id)):
            raise TransferFailed(f"another transfer for request {reservation.request_id!r} is under way")
        reservation.sender = (agent, send_id)
        reservation.begun_s = now_s

    def writer(self, agent: str, send_id: str) -> Reservation | None:
        """The reservation that a sender writes to and that is still wanted."""
        return next((found for found in self._by_id.values() if found.sender == (agent, send_id)), None)

    def receive(self, reservation: Reservation) -> None:
        """Make visible what was written; the sender must be through."""
        reservation.sender = None
        if reservation.slots is None:
            return
        node = self._cache.insert(reservation.ids, reservation.matched, reservation.node, reservation.slots)
        lock = self._cache.lock(node)
        self._cache.unlock(reservation.lock)
        reservation.node, reservation.lock, reservation.slots = node, lock, None

    def sender_stopped(self, agent: str, send_id: str) -> None:
        """That sender will not write any more; whoever reserved may let another try."""
        for nonce in [key for key, found in self._stopping.items() if found.sender == (agent, send_id)]:
            self._free(self._stopping.pop(nonce))
        reservation = self.writer(agent, send_id)
        if reservation is not None:
            reservation.sender = None

    def sender_lost(self, agent: str) -> None:
        """The whole engine of a sender is gone."""
        everywhere = (*self._by_id.values(), *self._stopping.values())
        for send_id in [found.sender[1] for found in everywhere if found.sender and found.sender[0] == agent]:
            self.sender_stopped(agent, send_id)

    def claim(self, request_id: str, now_s: float) -> None:
        """Its generation begins: what was received is kept a while, room that is still empty comes back."""
        reservation = self._by_id.get(request_id)
        if reservation is None:
            return
        if not reservation.received:
            self.release(request_id)
            return
        reservation.claimed = True
        reservation.expires_at_s = max(reservation.expires_at_s, now_s + CLAIM_S)

    def release(self, request_id: str) -> bool:
        """Give a reservation up; slots that are being written come back once their sender has stopped."""
        reservation = self._by_id.pop(request_id, None)
        if reservation is None:
            return False
        self._give_up(reservation)
        return True

    def release_all(self, *, claimed: bool = False) -> None:
        """All but those that a generation waits for, or those too."""
        for request_id in [key for key, found in self._by_id.items() if claimed or not found.claimed]:
            self.release(request_id)

    def expire(self, now_s: float) -> int:
        """Give up what is past its time; how many."""
        gone = [request_id for request_id, found in self._by_id.items() if found.expired(now_s)]
        for request_id in gone:
            # Its time being over, a sender begins no write any more, dead or not.
            self._by_id[request_id].sender = None
            self.release(request_id)
        for nonce in [key for key, found in self._stopping.items() if found.expired(now_s)]:
            self._free(self._stopping.pop(nonce))
        return len(gone)

    def next_expiry_s(self) -> float | None:
        everywhere = (*self._by_id.values(), *self._stopping.values())
        return min((found.expires_at_s for found in everywhere), default=None)

    def _give_up_older(self, request_id: str) -> None:
        older = self._by_id.get(request_id)
        if older is not None and older.claimed:
            raise BadRequest(f"request {request_id!r} is already generating")
        self.release(request_id)

    def _give_up(self, reservation: Reservation) -> None:
        if reservation.sender is None:
            self._free(reservation)
            return
        self._stopping[reservation.nonce] = reservation
        self._on_stop(reservation)

    def _free(self, reservation: Reservation) -> None:
        if reservation.slots is not None:
            self._cache.free(reservation.slots)
            reservation.slots = None
        self._cache.unlock(reservation.lock)
