"""The router's bounded queue: requests that wait, before any prefill is spent, for room on an engine."""

import asyncio
import enum
from collections import Counter, deque


class Lack(enum.StrEnum):
    """What a request waits for."""

    ADMISSION = "admission"
    """By plan, no engine may take on more."""
    KV_ROOM = "kv_room"
    TRANSFER_SLOT = "transfer_slot"


class QueueFull(Exception):
    """As many requests wait already as may."""


class RoomQueue:
    """First come, first served. Waiting never polls: whoever frees something calls `wake`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.waiting: Counter[Lack] = Counter()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, timeout_s: float, lack: Lack = Lack.KV_ROOM, *, first: bool = False) -> None:
        """Until woken; `first` for one who was woken in vain and keeps its place.

        Raises `QueueFull` at once, or `TimeoutError`. A cancelled waiter leaves the queue and passes its wake on.
        """
        if len(self._waiters) >= self._limit and not first:
            raise QueueFull
        turn = asyncio.get_running_loop().create_future()
        if first:
            self._waiters.appendleft(turn)
        else:
            self._waiters.append(turn)
        self.waiting[lack] += 1
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException:  # its time is up or its client left: whoever has its turn must not be kept waiting
            self._leave(turn)
            raise
        finally:
            self.waiting[lack] -= 1

    def wake(self) -> None:
        """Something became free: let the one who has waited longest try."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if turn in self._waiters:
            self._waiters.remove(turn)
        elif turn.done() and not turn.cancelled():
            self.wake()
