"""A store inside one process and one event loop: for tests, and for routers that run on their own."""

import asyncio
import contextlib
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from controller.store.newest import Newest
from controller.store.protocol import Entry, Lease, LostLease, StoreUnavailable, VersionConflict, Versioned


class MemoryStore:
    """`Store` without a backend. It never goes away, so only a closed store raises `StoreUnavailable`.

    `now_s` is the clock by which heartbeats and leases expire. Waiting (`read` with `block_s`, `watch`) is the event
    loop's.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._documents: dict[str, Versioned] = {}
        self._watches: defaultdict[str, set[Newest[Versioned]]] = defaultdict(set)
        self._streams: defaultdict[str, list[Entry]] = defaultdict(list)
        self._appended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._last_number = 0
        self._heartbeats: dict[str, tuple[float, bytes]] = {}
        self._leases: dict[str, tuple[float, Lease]] = {}
        self._closed = False

    async def get(self, key: str) -> Versioned | None:
        self._check_open()
        return self._documents.get(key)

    async def compare_and_set(
        self, key: str, value: bytes, expected_version: int | None, fence: Lease | None = None
    ) -> int:
        self._check_open()
        if fence is not None and self._held(fence.key) != fence:
            raise LostLease(fence)
        current = self._documents.get(key)
        actual = None if current is None else current.version
        if actual != expected_version:
            raise VersionConflict(key, expected_version, actual)
        written = Versioned((actual or 0) + 1, value)
        self._documents[key] = written
        for newest in self._watches[key]:
            newest.put(written)
        return written.version

    async def watch(self, key: str, poll_s: float = 1.0) -> AsyncGenerator[Versioned, None]:
        """As `Store.watch`; no notice is ever lost here, so `poll_s` has nothing to do."""
        if self._closed:
            return
        newest: Newest[Versioned] = Newest()
        if key in self._documents:
            newest.put(self._documents[key])
        self._watches[key].add(newest)
        try:
            async for document in newest:
                yield document
        finally:
            self._watches[key].discard(newest)

    async def append(self, stream: str, values: Sequence[bytes], max_len: int) -> None:
        self._check_open()
        entries = self._streams[stream]
        entries.extend(Entry(self._next_id(), value) for value in values)
        del entries[: max(0, len(entries) - max_len)]
        if values:
            self._appended.pop(stream, asyncio.Event()).set()

    async def read(self, stream: str, after: str | None, count: int, block_s: float | None = None) -> Sequence[Entry]:
        self._check_open()
        found = self._read_now(stream, after, count)
        if not found and block_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(block_s):
                    await self._appended[stream].wait()
            self._check_open()
            found = self._read_now(stream, after, count)
        return found

    async def latest(self, stream: str, count: int, before: str | None = None) -> Sequence[Entry]:
        self._check_open()
        entries = self._streams[stream]
        end = len(entries) if before is None else bisect_left(entries, _position(before), key=_position_of)
        return entries[max(0, end - count) : end]

    async def heartbeat(self, key: str, value: bytes, ttl_s: float) -> None:
        self._check_open()
        self._heartbeats[key] = (self._now_s() + ttl_s, value)

    async def alive(self, prefix: str) -> Mapping[str, bytes]:
        self._check_open()
        now_s = self._now_s()
        self._heartbeats = {key: beat for key, beat in self._heartbeats.items() if beat[0] > now_s}
        return {key: value for key, (_, value) in self._heartbeats.items() if key.startswith(prefix)}

    async def forget(self, key: str) -> None:
        self._check_open()
        self._heartbeats.pop(key, None)

    async def lease(self, key: str, holder: str, ttl_s: float) -> Lease | None:
        self._check_open()
        held = self._held(key)
        if held is not None and held.holder != holder:
            return None
        lease = held or Lease(key, holder, self._last_token(key) + 1)
        self._leases[key] = (self._now_s() + ttl_s, lease)
        return lease

    async def release(self, lease: Lease) -> None:
        self._check_open()
        if self._held(lease.key) == lease:
            self._leases[lease.key] = (self._now_s(), lease)

    async def ping(self) -> None:
        self._check_open()

    async def aclose(self) -> None:
        self._closed = True
        for newest in [newest for watches in self._watches.values() for newest in watches]:
            newest.close()
        for appended in self._appended.values():
            appended.set()

    def _read_now(self, stream: str, after: str | None, count: int) -> list[Entry]:
        entries = self._streams[stream]
        start = 0 if after is None else bisect_right(entries, _position(after), key=_position_of)
        return entries[start : start + count]

    def _held(self, key: str) -> Lease | None:
        """The lease as long as it has not expired."""
        until_s, lease = self._leases.get(key, (0.0, None))
        return lease if self._now_s() < until_s else None

    def _last_token(self, key: str) -> int:
        return self._leases[key][1].token if key in self._leases else 0

    def _next_id(self) -> str:
        self._last_number += 1
        return f"{self._last_number}-0"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this store has been closed")


def _position_of(entry: Entry) -> tuple[int, int]:
    return _position(entry.id)


def _position(entry_id: str) -> tuple[int, int]:
    """Ids have the form of Redis's, `number-number`, so that code cannot come to depend on a difference."""
    major, _, minor = entry_id.partition("-")
    return int(major), int(minor or 0)
