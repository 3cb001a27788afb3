"""The link model on the wall clock: a transfer takes as long as its share of the bandwidth lets it."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from engines.emulated.link import Link


class SharedLink:
    """Inbound link of one engine. Close it, or leave its `async with`, and what still waits is cancelled."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._flows: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def active(self) -> int:
        return self._link.active

    def start(self, flow_id: str, nbytes: int) -> asyncio.Future[None]:
        """Begin a flow; the future is done once its last byte is through. Cancel the future to stop it."""
        self._deliver()
        self._link.start(flow_id, nbytes, self._clock())
        done = self._flows[flow_id] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda _: self._ended(flow_id))
        self._schedule()
        return done

    async def __aenter__(self) -> "SharedLink":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for done in list(self._flows.values()):
            done.cancel()

    def _ended(self, flow_id: str) -> None:
        if self._flows.pop(flow_id, None) is not None:
            self._link.cancel(flow_id, self._clock())
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        following = self._link.next_completion()
        if following is None:
            self._timer = None
            return
        delay_s = max(0.0, following[1] - self._clock())
        # Timers of the loop are coarse and may be early, which would have this spin without finishing anything.
        self._timer = asyncio.get_running_loop().call_later(delay_s + 0.0005, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._deliver()
        self._schedule()

    def _deliver(self) -> None:
        for flow_id in self._link.advance(self._clock()):
            done = self._flows.pop(flow_id, None)
            if done is not None and not done.done():
                done.set_result(None)
