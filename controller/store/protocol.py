"""The store: where plans, SLOs, heartbeats and records live. Redis in production, memory in tests and embedded use.

Keys and stream names are whole names, e.g. `trimtab:llama:plan`; `controller.store.keys` makes them.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class StoreUnavailable(Exception):
    """The store did not answer, or said that it cannot. Nothing is known about whether a write took effect."""


class VersionConflict(Exception):
    """A compare-and-set lost: `actual` is the version that is there now (`None`: the key does not exist)."""

    def __init__(self, key: str, expected: int | None, actual: int | None) -> None:
        super().__init__(f"{key} is at version {actual}, not {expected}: read it again and repeat the change")
        self.expected = expected
        self.actual = actual


class LostLease(Exception):
    """A guarded write was refused: its writer no longer holds the lease. Nothing was written."""

    def __init__(self, lease: "Lease") -> None:
        super().__init__(f"{lease.holder!r} no longer holds {lease.key} under token {lease.token}")


@dataclass(frozen=True, slots=True)
class Versioned:
    """A document and the version it was written as (1, 2, …; gaps never occur)."""

    version: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One stream entry. `id` orders entries and is the position to read on from."""

    id: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """What its holder shows with each guarded write. `token` fences off holders of the past: it only ever grows."""

    key: str
    holder: str
    token: int


class Store(Protocol):
    """Documents with versions, streams with a bounded length, heartbeats that expire, and leases.

    Ownership: whoever opened the store closes it with `aclose()`. All methods may be called concurrently.
    Errors: every method raises `StoreUnavailable` when the backend does not answer within its time-out; none hangs.
    After the backend returns, calls work again without a new store.
    """

    async def get(self, key: str) -> Versioned | None:
        """The document under `key`, or `None` if there is none."""
        ...

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int | None, fence: Lease | None = None
    ) -> int:
        """Write `value` if the key is still at `expected_version` (`None`: absent); the new version.

        Watchers are told. Raises `VersionConflict` otherwise, and then nothing was written. With a `fence` the write
        also needs that lease to be held still, in the same instant; else it raises `LostLease` and writes nothing.
        """
        ...

    def watch(self, key: str, poll_s: float = 1.0) -> AsyncIterator[Versioned]:
        """The document now (if any) and after each change, newest only, in order of version, none twice.

        Survives the backend going away: it then waits and goes on. Polls every `poll_s` in case a notice is lost.
        """
        ...

    async def append(self, stream: str, values: Sequence[bytes], max_len: int) -> None:
        """Append entries in order and trim the stream to about `max_len` (never below it)."""
        ...

    async def read(self, stream: str, after: str | None, count: int, block_s: float | None = None) -> Sequence[Entry]:
        """Up to `count` entries after the id `after` (`None`: from the start), waiting up to `block_s` for one."""
        ...

    async def latest(self, stream: str, count: int, before: str | None = None) -> Sequence[Entry]:
        """The last `count` entries, of those before the id `before` if it is given; oldest first."""
        ...

    async def heartbeat(self, key: str, value: bytes, ttl_s: float) -> None:
        """Say that the owner of `key` lives; the key vanishes if this is not repeated within `ttl_s`."""
        ...

    async def alive(self, prefix: str) -> Mapping[str, bytes]:
        """All live heartbeats whose key starts with `prefix`, by full key."""
        ...

    async def forget(self, key: str) -> None:
        """Remove a heartbeat at once, on a clean leave. Unknown keys are fine."""
        ...

    async def lease(self, key: str, holder: str, ttl_s: float) -> Lease | None:
        """Take or renew the lease `key` for `ttl_s`; `None` while somebody else holds it.

        Renewing keeps the token. Whoever takes it, also after having let it expire, gets a token above all before.
        Holders must be unique: two that share a name hold the lease together. Expiry is by the backend's clock.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Let somebody else take a lease at once. Fine if it is no longer held; the token is not given again."""
        ...

    async def ping(self) -> None:
        """Raise `StoreUnavailable` if the backend does not answer."""
        ...

    async def aclose(self) -> None:
        """Close connections and end watches. Calling it twice is fine."""
        ...
