"""Runs the kernel on the wall clock: one pass after the other, each as long as the profile says."""

import asyncio
from collections.abc import Callable

from engines.emulated.events import Event, Pass
from engines.emulated.kernel import Kernel

MAX_LAG_S = 0.5
"""A process that is further behind than this gives the lost time up instead of hurrying after it."""

Clock = Callable[[], float]
OnPass = Callable[[Pass, float], None]
OnEvent = Callable[[Event], None]


class Driver:
    """Owns the kernel's passes. Call `wake` after anything that may give it work.

    Passes end at absolute deadlines, and the next one begins where the last should have ended, so that the overhead
    of this process does not add up. `on_pass` gets each pass with its modelled end; `on_event` what came out of it.
    """

    def __init__(self, kernel: Kernel, clock: Clock, on_event: OnEvent, on_pass: OnPass) -> None:
        self._kernel = kernel
        self._clock = clock
        self._on_event = on_event
        self._on_pass = on_pass
        self._work = asyncio.Event()

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        """Until cancelled."""
        start_s = self._clock()
        while True:
            self._kernel.expire(self._clock())
            started = self._kernel.begin_pass(start_s)
            if started is None:
                await self._idle()
                start_s = self._clock()
                continue
            end_s = start_s + started.duration_s
            await asyncio.sleep(max(0.0, end_s - self._clock()))
            self._end_pass(started, end_s)
            start_s = max(end_s, self._clock() - MAX_LAG_S)

    def _end_pass(self, ended: Pass, end_s: float) -> None:
        events = self._kernel.end_pass(end_s)
        for event in events:
            self._on_event(event)
        self._on_pass(ended, end_s)

    async def _idle(self) -> None:
        """Until there may be work: someone called `wake`, or a reservation is over."""
        self._work.clear()
        expiry_s = self._kernel.next_expiry_s()
        timeout_s = None if expiry_s is None else max(0.0, expiry_s - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await self._work.wait()
        except TimeoutError:
            return
