"""A network link that its transfers share evenly, in whatever time the caller keeps."""

import heapq
from collections import deque


class Link:
    """Processor sharing: each of k flows gets 1/k of the bandwidth. After its last byte a flow takes `latency_s` more.

    Times must not go backwards from call to call.
    """

    def __init__(self, bandwidth_bytes_per_s: float, latency_s: float) -> None:
        if bandwidth_bytes_per_s <= 0 or latency_s < 0:
            raise ValueError(f"bandwidth must be above 0 and latency not below: {bandwidth_bytes_per_s}, {latency_s}")
        self._bandwidth = bandwidth_bytes_per_s
        self._latency_s = latency_s
        self._now_s = 0.0
        # Bytes that a flow present since the link was last empty would have got. A flow's bytes are through once this
        # has grown by its size, whoever came and went meanwhile.
        self._served = 0.0
        self._order = 0
        self._queue: list[tuple[float, int, str]] = []
        self._sharing: dict[str, int] = {}
        self._landing: deque[tuple[float, str]] = deque()

    @property
    def active(self) -> int:
        """Flows that have started and neither finished nor been cancelled."""
        return len(self._sharing) + len(self._landing)

    def start(self, flow_id: str, nbytes: int, now_s: float) -> None:
        """Begin to move `nbytes`. Raises `ValueError` for a negative size or an id that is under way."""
        if nbytes < 0 or self._under_way(flow_id):
            raise ValueError(f"flow {flow_id!r} of {nbytes} bytes: negative, or the id is under way")
        self._serve_until(now_s)
        self._order += 1
        self._sharing[flow_id] = self._order
        heapq.heappush(self._queue, (self._served + nbytes, self._order, flow_id))

    def cancel(self, flow_id: str, now_s: float) -> bool:
        """Stop a flow; its share goes to the others. `False` if it is not under way."""
        self._serve_until(now_s)
        if self._sharing.pop(flow_id, None) is None:
            before = len(self._landing)
            self._landing = deque(entry for entry in self._landing if entry[1] != flow_id)
            return len(self._landing) < before
        self._forget_cancelled()
        return True

    def next_completion(self) -> tuple[str, float] | None:
        """The flow that finishes next and when, if none starts or is cancelled before; `None` if there is none."""
        if self._landing:
            at_s, flow_id = self._landing[0]
            return flow_id, at_s
        if not self._queue:
            return None
        return self._queue[0][2], self._next_served_s() + self._latency_s

    def advance(self, now_s: float) -> list[str]:
        """The flows that have finished by `now_s`, in order; each is told once."""
        self._serve_until(now_s)
        finished = []
        while self._landing and self._landing[0][0] <= now_s:
            finished.append(self._landing.popleft()[1])
        return finished

    def _under_way(self, flow_id: str) -> bool:
        return flow_id in self._sharing or any(flow_id == landing for _, landing in self._landing)

    def _next_served_s(self) -> float:
        left = max(0.0, self._queue[0][0] - self._served)
        return self._now_s + left * len(self._sharing) / self._bandwidth

    def _serve_until(self, now_s: float) -> None:
        while self._queue and (at_s := self._next_served_s()) <= now_s:
            self._served, _, flow_id = heapq.heappop(self._queue)
            self._now_s = at_s
            del self._sharing[flow_id]
            self._landing.append((at_s + self._latency_s, flow_id))
            self._forget_cancelled()
        if self._sharing:
            self._served += (now_s - self._now_s) * self._bandwidth / len(self._sharing)
        self._now_s = max(self._now_s, now_s)

    def _forget_cancelled(self) -> None:
        while self._queue and self._sharing.get(self._queue[0][2]) != self._queue[0][1]:
            heapq.heappop(self._queue)
        if not self._queue:
            self._served = 0.0
