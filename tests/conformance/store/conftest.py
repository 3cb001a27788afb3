"""One suite for every store: memory, Redis, and Redis's imitation where it is cheap."""

from collections.abc import AsyncIterator

import pytest
from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis

from controller.store import (
    RedisStore,
    Store,
    open_store,
)


@pytest.fixture(params=["memory", "redis", "fakeredis"])
async def store(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Store]:
    made: Store
    if request.param == "memory":
        made = open_store("memory://")
    elif request.param == "redis":
        made = open_store(redis_url)
    else:
        made = RedisStore(FakeAsyncRedis(server=FakeServer(), protocol=2))
    yield made
    await made.aclose()


@pytest.fixture
async def redis_store(redis_url: str) -> AsyncIterator[RedisStore]:
    made = RedisStore.from_url(redis_url)
    yield made
    await made.aclose()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
async def limited(redis_url: str, raw: Redis) -> AsyncIterator[RedisStore]:
    """A store whose user may do nothing; `raw` can grant it something."""
    await raw.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pass", "+client")
    made = RedisStore.from_url(redis_url.replace("redis://", "redis://limited:pass@"))
    yield made
    await made.aclose()
    await raw.execute_command("ACL", "DELUSER", "limited")
