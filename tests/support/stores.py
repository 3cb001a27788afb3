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


async def answers_of(store: Store) -> list[object]:
    """What each method of a store gives or raises, asked all at once."""
    calls: list[Awaitable[object]] = [
        store.get("plan"),
        store.compare_and_set("plan", b"", None),
        store.append("requests", [b""], 10),
        store.read("requests", None, 1),
        store.latest("requests", 1),
        store.heartbeat("engine:a", b"", 1),
        store.alive("engine:"),
        store.forget("engine:a"),
        store.lease("leader", "a", 1),
        store.release(Lease("leader", "a", 1)),
        store.ping(),
    ]
    return await asyncio.gather(*calls, return_exceptions=True)
