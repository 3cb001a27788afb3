"""A place for the newest of a series of values, between one that finds them and one that takes them."""

import asyncio
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Newest(Generic[Item]):
    """An async iterator over what is `put`, for one taker. What was not taken in time is replaced, never queued.

    A value equal to the one put before it is ignored. `close()` ends the iteration.
    """

    def __init__(self) -> None:
        self._last: Item | None = None
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, item: Item) -> None:
        if item != self._last:
            self._last = item
            self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        await self._ready.wait()
        if self._closed or self._last is None:
            raise StopAsyncIteration
        self._ready.clear()
        return self._last
