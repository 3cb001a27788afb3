"""Room promised to KV that is on its way: who may write where, until when."""

from array import array
from dataclasses import dataclass, field

from engines.emulated.pool import KvPool
from engines.emulated.radix import Node
from engines.errors import BadRequest, NoKvRoom, ReservationGone


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for the KV of `prompt[begin:end]`, with the cached prefix before it pinned."""

    request_id: str
    prompt: "array[int]"
    matched: int
    """Tokens of `prompt[:end]` that the cache held: where the sender begins."""
    end: int
    expires_at_s: float
    node: Node
    """The end of what it pins."""
    tokens: int
    """Tokens of room still reserved: `end - matched`, and 0 once they were received."""
    received: bool = False
    claimants: set[str] = field(default_factory=set)
    """Generations that came for it; while there is one, it does not expire."""

    @property
    def begin(self) -> int:
        return self.matched


class Reservations:
    """The reservations of one engine, by request id, oldest first. Owns their room in the pool and their pins."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._by_id: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def tokens(self) -> int:
        return sum(reservation.tokens for reservation in self._by_id.values())

    def open(
        self, request_id: str, prompt: "array[int]", end: int, expires_at_s: float, spare_tokens: int, retry_s: float
    ) -> Reservation:
        """Reserve `prompt[:end]`, replacing an older reservation of the id; `spare_tokens` must stay available.

        Raises `BadRequest` if a generation holds the older one, `NoKvRoom` if there is no room.
        """
        self._give_up_older(request_id)
        matched, node = self._pool.cache.match(prompt, end)
        self._pool.cache.lock(node)
        needed = end - matched
        if self._pool.available_tokens < needed + spare_tokens or not self._pool.reserve(needed):
            self._pool.cache.unlock(node)
            raise NoKvRoom(f"no room for {needed} tokens of KV now", retry_after_s=retry_s)
        reservation = Reservation(request_id, prompt, matched, end, expires_at_s, node, needed, received=needed == 0)
        self._by_id[request_id] = reservation
        return reservation

    def receive(self, request_id: str, begin: int, end: int, now_s: float) -> None:
        """Cache and pin what was reserved; doing it twice is fine.

        Raises `ReservationGone`, or `BadRequest` if `[begin, end)` does not fill the reservation.
        """
        reservation = self._by_id.get(request_id)
        if reservation is None or self._expired(reservation, now_s):
            raise ReservationGone(f"no reservation for request {request_id!r}")
        if begin > reservation.begin or end != reservation.end:
            raise BadRequest(f"tokens [{begin}, {end}) are not the reserved [{reservation.begin}, {reservation.end})")
        if not reservation.received:
            self._fill(reservation)

    def release(self, request_id: str) -> bool:
        reservation = self._by_id.pop(request_id, None)
        if reservation is None:
            return False
        self._pool.unreserve(reservation.tokens)
        self._pool.cache.unlock(reservation.node)
        return True

    def expire(self, now_s: float) -> list[str]:
        """Release what is past its time; the request ids."""
        gone = [request_id for request_id, found in self._by_id.items() if self._expired(found, now_s)]
        for request_id in gone:
            self.release(request_id)
        return gone

    def next_expiry_s(self) -> float | None:
        return min((found.expires_at_s for found in self._by_id.values() if not found.claimants), default=None)

    def release_unclaimed(self) -> None:
        for request_id in [key for key, found in self._by_id.items() if not found.claimants]:
            self.release(request_id)

    def release_youngest_claimed(self) -> bool:
        """Take room back from a generation that still waits; it then computes for itself. `False` if there is none."""
        for request_id in reversed(self._by_id):
            if self._by_id[request_id].claimants:
                return self.release(request_id)
        return False

    def claim(self, request_id: str, group: str | None, now_s: float) -> None:
        """Keep the reservation of the generation, or of its group, until the generation is admitted or gone."""
        for key in (request_id, group):
            reservation = self._by_id.get(key) if key is not None else None
            if reservation is not None and not self._expired(reservation, now_s):
                reservation.claimants.add(request_id)
                return

    def claimed_by(self, request_id: str, group: str | None) -> Reservation | None:
        for key in (request_id, group):
            reservation = self._by_id.get(key) if key is not None else None
            if reservation is not None and request_id in reservation.claimants:
                return reservation
        return None

    def unclaim(self, request_id: str, group: str | None) -> None:
        """The generation is gone: release what nobody else claims."""
        reservation = self.claimed_by(request_id, group)
        if reservation is not None:
            reservation.claimants.discard(request_id)
            if not reservation.claimants:
                self.release(reservation.request_id)

    def _give_up_older(self, request_id: str) -> None:
        older = self._by_id.get(request_id)
        if older is not None and older.claimants:
            raise BadRequest(f"request {request_id!r} is already generating")
        self.release(request_id)

    def _fill(self, reservation: Reservation) -> None:
        pool = self._pool
        pool.unreserve(reservation.tokens)
        pool.take(reservation.tokens)
        node = pool.store(reservation.prompt, reservation.end, reservation.tokens)
        pool.cache.lock(node)
        pool.cache.unlock(reservation.node)
        reservation.node, reservation.tokens, reservation.received = node, 0, True

    @staticmethod
    def _expired(reservation: Reservation, now_s: float) -> bool:
        return not reservation.claimants and now_s >= reservation.expires_at_s
