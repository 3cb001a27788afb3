"""What every test may use: a real Redis for the session, emptied for each test, free ports, real engines."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
from redis import Redis

from controller.stack.embedded import EmbeddedRedis, embedded_redis, find_server
from controller.stack.embedded import free_port as find_free_port
from tests.support.otlp import Collector, collecting
from tests.support.sglang import Pair, running_pair
from tests.support.sglang_questions import QUESTIONS


def pytest_report_header() -> str:
    return find_server().source


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_server() -> AsyncIterator[EmbeddedRedis]:
    """Shared by all tests: do not stop it. A test that wants a Redis to die starts one with `embedded_redis()`."""
    async with embedded_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The address of an empty Redis."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def free_port() -> Callable[[], int]:
    return find_free_port


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes what the real engines and their routers have to say about traces that a test begins."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def sglang_pair(
    redis_server: EmbeddedRedis, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Two real engines for all tests of the session: leave them idle, or dead and `revive`d by the next."""
    folder = tmp_path_factory.mktemp("sglang")
    with running_pair(folder, find_free_port, redis_server.url, QUESTIONS, collector.url) as pair:
        yield pair
