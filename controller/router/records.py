"""Arrivals and request records on their way to the store: buffered, sent in batches, never in a request's way."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import structlog

from controller.metrics import RouterMetrics
from controller.store import Keys, Store, StoreUnavailable
from engines.records import ArrivalBatch, RequestRecord
from tuner.prefix import sketch

log = structlog.get_logger()

STREAM_LENGTH = 100_000
STREAM_ARRIVALS = 200_000
"""Arrivals to keep in the store; an entry of that stream holds as many as a router took on between two flushes."""
MIN_STREAM_BATCHES = 1_000
"""Kept in any case: a router that has much to say must not push out what many quiet ones said."""
BATCH = 500

Arrival = tuple[str, float, int, int, str, int, Sequence[int]]
"""Request id, monotonic seconds, estimated prompt tokens, prompt bytes, class, plan version, block hashes.

A plain tuple, as one is made for each request."""

Kept = TypeVar("Kept")


class Recorder:
    """Keeps the newest `capacity` of arrivals and of records while the store is away, and counts what it had to drop.

    `wall_offset_s` is what to add to the router's monotonic time to get Unix time now.
    """

    def __init__(
        self,
        store: Store | None,
        keys: Keys,
        router_id: str,
        capacity: int,
        metrics: RouterMetrics,
        wall_offset_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._keys = keys
        self._router_id = router_id
        self._capacity = capacity
        self._metrics = metrics
        self._wall_offset_s = wall_offset_s
        self._arrivals: deque[Arrival] = deque()
        self._records: deque[bytes] = deque()
        self._encode = msgspec.json.Encoder().encode

    def __len__(self) -> int:
        """Finished requests that are not in the store yet."""
        return len(self._records)

    def arrived(self, arrival: Arrival) -> None:
        """Note one. Called for each request, so it does no more than it must."""
        arrivals = self._arrivals
        if len(arrivals) >= self._capacity:
            arrivals.popleft()
            self._metrics.arrivals_lost.inc()
        arrivals.append(arrival)

    def put(self, record: RequestRecord) -> None:
        if self._store is None:
            return
        if len(self._records) >= self._capacity:
            self._records.popleft()
            self._metrics.records_lost.inc()
        self._records.append(self._encode(record))

    async def run(self, every_s: float = 0.2) -> None:
        """Send what has gathered, and bring metrics up to date, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self._metrics.fold()
            await self.flush()

    async def flush(self) -> None:
        """Send everything now. A batch that may not have arrived is sent again: readers tell by `request_id`.

        Arrivals go first, so that a reader mostly knows of a request's arrival before it learns of its end.
        """
        if self._store is None:
            return self._arrivals.clear()
        try:
            await self._send_arrivals(self._store)
            await self._send_records(self._store)
        except StoreUnavailable as error:
            if self._metrics.store_seen(up=False):
                log.warning("store_away", error=str(error))

    async def _send_arrivals(self, store: Store) -> None:
        while batch := _head(self._arrivals):
            entry = self._encode(self._arrival_batch(batch))
            await store.append(self._keys.arrivals, [entry], max(MIN_STREAM_BATCHES, STREAM_ARRIVALS // len(batch)))
            self._sent(self._arrivals, batch)

    async def _send_records(self, store: Store) -> None:
        while batch := _head(self._records):
            await store.append(self._keys.requests, batch, STREAM_LENGTH)
            self._sent(self._records, batch)

    def _arrival_batch(self, arrivals: Sequence[Arrival]) -> ArrivalBatch:
        offset_s = self._wall_offset_s()
        ids, at_s, tokens, sizes, classes, versions, hashes = zip(*arrivals, strict=True)
        return ArrivalBatch(
            router_id=self._router_id,
            request_ids=ids,
            arrived_at_s=tuple([each + offset_s for each in at_s]),
            prompt_tokens=tokens,
            prompt_bytes=sizes,
            slo_classes=classes,
            plan_versions=versions,
            prefix_hashes=tuple(map(sketch, hashes)),
        )

    def _sent(self, buffer: deque[Kept], batch: Sequence[Kept]) -> None:
        """Remove what was sent; the head may meanwhile have been dropped for lack of room."""
        self._metrics.store_seen(up=True)
        sent = set(map(id, batch))
        while buffer and id(buffer[0]) in sent:
            buffer.popleft()


def _head(buffer: deque[Kept]) -> list[Kept]:
    return [buffer[at] for at in range(min(BATCH, len(buffer)))]
