"""Which of the controllers leads: the holder of a lease in the store, renewed for as long as it lives."""

import asyncio
from collections.abc import Callable

import structlog

from controller.store.protocol import Lease, Store, StoreUnavailable

LOOKS_PER_LEASE = 10

log = structlog.get_logger(__name__)


class Leadership:
    """One controller's claim to lead. `run` it beside whatever needs to know.

    A leader that dies is replaced within `lease_s`: its lease lasts one look less, and the others look that often.
    A leader that leaves lets go at once. `clock` is monotonic seconds.
    """

    def __init__(self, store: Store, key: str, holder: str, lease_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._key = key
        self._holder = holder
        self._look_s = lease_s / LOOKS_PER_LEASE
        self._ttl_s = lease_s - self._look_s
        self._clock = clock
        self._lease: Lease | None = None
        self._until_s = 0.0
        self._led = False
        self.times = 0
        """How often this controller became the leader."""

    @property
    def lease(self) -> Lease | None:
        """The lease while this controller leads. It runs out here no later than in the store, heard from or not."""
        return self._lease if self._clock() < self._until_s else None

    async def run(self) -> None:
        """Take or renew the lease until cancelled, then let go of it."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._look_s)
        finally:
            await self._let_go()

    async def look(self) -> None:
        """Ask for the lease once. A store that is away changes nothing: what is held runs out by itself."""
        asked_s = self._clock()
        try:
            lease = await self._store.lease(self._key, self._holder, self._ttl_s)
        except StoreUnavailable as error:
            log.debug("lease not renewed", error=str(error))
        else:
            self._lease, self._until_s = lease, asked_s + self._ttl_s
        self._note()

    def _note(self) -> None:
        leads = self.lease is not None
        if leads and not self._led:
            self.times += 1
        if leads is not self._led:
            log.info("this controller leads" if leads else "this controller no longer leads", holder=self._holder)
        self._led = leads

    async def _let_go(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await self._store.release(lease)
        except StoreUnavailable as error:
            log.info("lease left to run out", error=str(error))
