"""Fixtures for whole fleets; what they are made of is in `tests/support/fleet.py`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, Meddler, StartEngine, StartFleet, engine_processes, open_fleet


@pytest.fixture
async def start_engine(tmp_path: Path) -> AsyncIterator[StartEngine]:
    """Start engines: `await start_engine("e0", kv_capacity_tokens=2000, …)`; all are gone when the test ends."""
    async with engine_processes(tmp_path) as start:
        yield start


@pytest.fixture
async def start_fleet(start_engine: StartEngine, redis_url: str) -> AsyncIterator[StartFleet]:
    """`await start_fleet(2, engine={…}, router={…}, per_engine={"e0": {…}})`."""
    async with AsyncExitStack() as stack:

        async def start(
            count: int = 2,
            engine: dict[str, object] | None = None,
            router: dict[str, object] | None = None,
            per_engine: dict[str, dict[str, object]] | None = None,
        ) -> Fleet:
            names = [f"e{number}" for number in range(count)]
            flags = {name: (engine or {}) | (per_engine or {}).get(name, {}) for name in names}
            engines = await asyncio.gather(*(start_engine(name, **flags[name]) for name in names))
            return await stack.enter_async_context(
                open_fleet({each.engine_id: each for each in engines}, redis_url, router or {})
            )

        yield start


@pytest.fixture
async def meddler(free_port: Callable[[], int]) -> AsyncIterator[tuple[Meddler, dict[str, object]]]:
    """A meddling proxy, and the flags of the engine that receives through it."""
    meddling, kv_port = Meddler(), free_port()
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(meddling.carry(reader, writer, "127.0.0.1", kv_port))
        tasks.add(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield meddling, {"kv_port": kv_port, "kv_advertise": f"127.0.0.1:{port}"}
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
