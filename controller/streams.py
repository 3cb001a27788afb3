"""Reading the store's streams from where one was, through restarts of the store."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar

import msgspec
import structlog

from controller.store.protocol import Entry, Store

Record = TypeVar("Record")

PAGE = 500
FIRST = 20_000
"""Entries of the past that a new reader begins with."""

log = structlog.get_logger(__name__)


class StreamReader(Generic[Record]):
    """Follows one stream of JSON records. What cannot be decoded is counted and left out."""

    def __init__(self, store: Store, stream: str, kind: type[Record]) -> None:
        self._store = store
        self._stream = stream
        self._decoder = msgspec.json.Decoder(kind)
        self._position: str | None = None
        self.read = 0
        self.malformed = 0

    async def news(self) -> AsyncIterator[Sequence[Record]]:
        """What was appended since the last call, in pages; raises `StoreUnavailable`, and then goes on from there."""
        if self._position is None or await self._began_anew(self._position):
            past = await self._store.latest(self._stream, FIRST)
            for at in range(0, len(past), PAGE):
                yield self._decoded(past[at : at + PAGE])
                await asyncio.sleep(0)  # others may have their turn meanwhile
            return
        while entries := await self._store.read(self._stream, self._position, PAGE):
            yield self._decoded(entries)

    async def _began_anew(self, position: str) -> bool:
        """Whether all entries lie before our position: a store without its data, or with its clock set back."""
        latest = await self._store.latest(self._stream, 1)
        if not latest or _key(latest[0].id) >= _key(position):
            return False
        log.warning("stream began anew", stream=self._stream)
        return True

    def _decoded(self, entries: Sequence[Entry]) -> Sequence[Record]:
        records = [record for entry in entries if (record := self._record(entry)) is not None]
        if entries:
            self._position = entries[-1].id
        self.read += len(records)
        return records

    def _record(self, entry: Entry) -> Record | None:
        try:
            return self._decoder.decode(entry.value)
        except msgspec.DecodeError:
            self.malformed += 1
            return None


def _key(entry_id: str) -> tuple[int, int]:
    major, _, minor = entry_id.partition("-")
    return int(major), int(minor or 0)
