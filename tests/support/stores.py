"""What tests of stores do again and again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from controller.store import (
    Lease,
    Store,
    VersionConflict,
    Versioned,
)

LIVENESS_S = 20.0
EVERY_BYTE = bytes(range(256)) + b"\r\n\x00\r\n"


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not await holds():
            await asyncio.sleep(0.01)


async def following(watch: AsyncIterator[Versioned]) -> Versioned:
    async with asyncio.timeout(LIVENESS_S):
        return await anext(watch)


async def write(store: Store, key: str, value: bytes) -> int:
    """Write over whatever is there, as an operator would; counts on somebody else writing too."""
    while True:
        current = await store.get(key)
        try:
            return await store.compare_and_set(key, value, None if current is None else current.version)
        except VersionConflict:
            continue


async def lease_of(store: Store, holder: str, ttl_s: float = 60) -> Lease:
    lease = await store.lease("leader", holder, ttl_s)
    assert lease is not None
    return lease
