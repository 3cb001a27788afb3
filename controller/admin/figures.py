"""What clients got in the last minutes, as columns, for somebody who watches.

Memory and work are bounded: the newest `KEPT` finished requests and arrivals are held, and each reading takes in only
what is new since the last.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from controller.store.keys import Keys
from controller.store.protocol import Store
from controller.streams import FIRST, StreamReader
from engines.records import Outcome
from tuner.blame import NOT_COUNTED
from tuner.slo import SloTable

KEPT = 60_000
FRESH_S = 0.5
"""Several watchers share one reading."""

ROW = np.dtype([("at_s", "f8"), ("code", "i4"), ("answered", "?"), ("ttft_s", "f8"), ("tpot_s", "f8")])
"""`code` stands for the class. Of an arrival only the first two mean anything; NaN is what was not measured."""

Row = tuple[float, int, bool, float, float]
Rows = NDArray[np.void]


class Finished(msgspec.Struct, frozen=True):
    """What of a `RequestRecord` is needed here."""

    request_id: str
    slo_class: str
    arrived_at_s: float
    e2e_s: float
    outcome: Outcome
    ttft_s: float | None = None
    tpot_s: float | None = None


class Arrived(msgspec.Struct, frozen=True):
    """What of an `ArrivalBatch` is needed here."""

    request_ids: tuple[str, ...]
    arrived_at_s: tuple[float, ...]
    slo_classes: tuple[str, ...]


class Kept:
    """The newest rows of a stream, each request once: a router that lost the answer to a write sends it again."""

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._ids: dict[str, None] = {}
        self.rows: Rows = np.empty(0, ROW)
        self.known_from_s: float | None = None
        """Unix time before which there may have been more than is kept; `None` if everything is here."""

    def add(self, news: Iterable[tuple[str, Row]]) -> None:
        fresh = {name: row for name, row in news if name not in self._ids}
        self._ids.update(dict.fromkeys(fresh))
        self.rows = np.concatenate([self.rows, np.array(list(fresh.values()), ROW)])
        if len(self.rows) > self._limit:
            self.rows = self.rows[-self._limit :]
            self.lacks_older()
        if len(self._ids) > 2 * self._limit:
            self._ids = dict.fromkeys(list(self._ids)[-self._limit :])

    def lacks_older(self) -> None:
        """Note that there was more before the oldest row."""
        self.known_from_s = float(self.rows["at_s"].min()) if len(self.rows) else None


class Figures:
    """Follows the streams of arrivals and of finished requests. Safe to use from several tasks at once."""

    def __init__(self, store: Store, keys: Keys, clock: Callable[[], float], limit: int = KEPT) -> None:
        """`clock`: monotonic seconds."""
        self._requests = StreamReader(store, keys.requests, Finished)
        self._batches = StreamReader(store, keys.arrivals, Arrived)
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at_s: float | None = None
        self._codes: dict[str, int] = {}
        self.finished = Kept(limit)
        """At the time they ended; without those that say nothing about the fleet (`tuner.blame.NOT_COUNTED`)."""
        self.arrived = Kept(limit)

    async def catch_up(self) -> None:
        """Take in what is new, unless that has just been done.

        Raises `StoreUnavailable`, and the next call goes on from there. The first reading may take a second; it is
        done beside the event loop.
        """
        async with self._lock:
            if self._read_at_s is not None and self._clock() - self._read_at_s < FRESH_S:
                return
            async for batches in self._batches.news():
                await asyncio.to_thread(self.arrived.add, self._arrivals(batches))
            async for requests in self._requests.news():
                await asyncio.to_thread(self.finished.add, self._endings(requests))
            if self._read_at_s is None:
                self._note_what_was_missed()
            self._read_at_s = self._clock()

    def marks(self, slo_class: str, slos: SloTable) -> NDArray[np.bool_]:
        """By code: whether rows that have it count as this class. What is no class any more counts as `default`."""
        return np.array([slos.resolve(name) == slo_class for name in list(self._codes)], dtype=np.bool_)

    def _note_what_was_missed(self) -> None:
        """A first reading goes back only so far."""
        for reader, kept in ((self._batches, self.arrived), (self._requests, self.finished)):
            if reader.read + reader.malformed >= FIRST:
                kept.lacks_older()

    def _arrivals(self, batches: Sequence[Arrived]) -> Iterable[tuple[str, Row]]:
        for batch in batches:
            columns = zip(batch.request_ids, batch.arrived_at_s, batch.slo_classes, strict=False)
            for name, at_s, slo_class in columns:
                yield name, (at_s, self._code(slo_class), False, np.nan, np.nan)

    def _endings(self, requests: Sequence[Finished]) -> Iterable[tuple[str, Row]]:
        for one in requests:
            if one.outcome not in NOT_COUNTED:
                at_s, code = one.arrived_at_s + one.e2e_s, self._code(one.slo_class)
                yield one.request_id, (at_s, code, one.outcome is Outcome.OK, _or_nan(one.ttft_s), _or_nan(one.tpot_s))

    def _code(self, slo_class: str) -> int:
        return self._codes.setdefault(slo_class, len(self._codes))


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
