"""Simulated time: what happens next, and when."""

import heapq
from collections.abc import Callable
from typing import Any

Handler = Callable[[Any], None]


class Events:
    """A heap of things to come; those of one moment happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._planned = 0
        self._heap: list[tuple[float, int, Handler, Any]] = []

    def at(self, at_s: float, handler: Handler, argument: Any) -> None:
        """Call `handler(argument)` at `at_s`, not before now."""
        self._planned += 1
        heapq.heappush(self._heap, (at_s, self._planned, handler, argument))

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Go to the next event and let it happen."""
        self.now_s, _, handler, argument = heapq.heappop(self._heap)
        handler(argument)
