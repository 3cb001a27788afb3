"""Request records on their way to the store: buffered, sent in batches, never in a request's way."""

import asyncio
from collections import deque

import msgspec
import structlog

from controller.metrics import RouterMetrics
from controller.store import Store, StoreUnavailable
from engines.records import RequestRecord

log = structlog.get_logger()

STREAM_LENGTH = 100_000
BATCH = 500


class Recorder:
    """Keeps the newest `capacity` records while the store is away, and counts what it had to drop."""

    def __init__(self, store: Store | None, stream: str, capacity: int, metrics: RouterMetrics) -> None:
        self._store = store
        self._stream = stream
        self._capacity = capacity
        self._metrics = metrics
        self._buffer: deque[bytes] = deque()
        self._encode = msgspec.json.Encoder().encode

    def __len__(self) -> int:
        return len(self._buffer)

    def put(self, record: RequestRecord) -> None:
        if self._store is None:
            return
        if len(self._buffer) >= self._capacity:
            self._buffer.popleft()
            self._metrics.records_lost.inc()
        self._buffer.append(self._encode(record))

    async def run(self, every_s: float = 0.2) -> None:
        """Send what has gathered, and bring metrics up to date, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self._metrics.fold()
            await self.flush()

    async def flush(self) -> None:
        """Send everything now. A batch that may not have arrived is sent again: readers tell by `request_id`."""
        while self._buffer and self._store is not None:
            batch = [self._buffer[at] for at in range(min(BATCH, len(self._buffer)))]
            try:
                await self._store.append(self._stream, batch, STREAM_LENGTH)
            except StoreUnavailable as error:
                if self._metrics.store_seen(up=False):
                    log.warning("store_away", error=str(error))
                return
            self._metrics.store_seen(up=True)
            self._drop(batch)

    def _drop(self, batch: list[bytes]) -> None:
        """Remove what was sent; the head may meanwhile have been dropped for lack of room."""
        sent = set(map(id, batch))
        while self._buffer and id(self._buffer[0]) in sent:
            self._buffer.popleft()
