"""What only Redis can do: be shared, refuse, die and come back."""

import asyncio
import os
import signal

import pytest
import structlog
from redis.asyncio import Redis

from controller.stack.embedded import embedded_redis
from controller.store import (
    Lease,
    LostLease,
    RedisStore,
    StoreUnavailable,
    Versioned,
)
from tests.support.stores import LIVENESS_S, answers_of, eventually, following, lease_of, write


async def test_two_stores_on_one_redis_see_each_others_changes(redis_url: str, redis_store: RedisStore) -> None:
    watch = redis_store.watch("plan", poll_s=1000)
    other = RedisStore.from_url(redis_url)
    await other.compare_and_set("plan", b"1", None)
    assert await following(watch) == Versioned(1, b"1")
    await other.compare_and_set("plan", b"2", 1)
    assert await following(watch) == Versioned(2, b"2")
    await other.aclose()


async def test_a_change_whose_notice_was_lost_is_found_by_polling(redis_store: RedisStore, raw: Redis) -> None:
    await redis_store.compare_and_set("plan", b"1", None)
    watch = redis_store.watch("plan", poll_s=0.05)
    await following(watch)
    await raw.hset("plan", mapping={"version": 2, "value": b"unannounced"})
    assert await following(watch) == Versioned(2, b"unannounced")


async def test_a_watch_that_is_closed_leaves_no_subscription(redis_store: RedisStore, raw: Redis) -> None:
    await redis_store.compare_and_set("plan", b"1", None)
    watch = redis_store.watch("plan")

    async def subscribers() -> int:
        return int((await raw.pubsub_numsub("plan"))[0][1])

    async def one() -> bool:
        return await subscribers() == 1

    async def none() -> bool:
        return await subscribers() == 0

    await following(watch)
    await eventually(one)
    await watch.aclose()
    await eventually(none)


async def test_a_watch_on_what_is_no_document_says_so_and_goes_on_once_it_is_one(
    redis_store: RedisStore, raw: Redis
) -> None:
    await redis_store.append("plan", [b""], 10)
    watching = asyncio.create_task(following(redis_store.watch("plan", poll_s=0.05)))

    async def has_said_so() -> bool:
        return any("WRONGTYPE" in entry.get("error", "") for entry in said)

    with structlog.testing.capture_logs() as said:
        await eventually(has_said_so)
    assert not watching.done()
    await raw.delete("plan")
    await redis_store.compare_and_set("plan", b"1", None)
    assert await watching == Versioned(1, b"1")


async def test_a_redis_that_refuses_a_command_is_unavailable_to_every_method(limited: RedisStore) -> None:
    assert {type(each) for each in await answers_of(limited)} == {StoreUnavailable}


async def test_a_watch_survives_a_redis_that_refuses_for_a_while(limited: RedisStore, raw: Redis) -> None:
    await raw.hset("plan", mapping={"version": 1, "value": b"1"})
    watching = asyncio.create_task(following(limited.watch("plan", poll_s=0.05)))
    await asyncio.sleep(0.2)  # some refusals
    assert not watching.done()
    await raw.execute_command("ACL", "SETUSER", "limited", "allkeys", "allchannels", "+@all")
    assert await watching == Versioned(1, b"1")


async def test_a_redis_that_is_busy_with_a_script_is_unavailable(redis_store: RedisStore, raw: Redis) -> None:
    await raw.config_set("lua-time-limit", 1)
    busy = asyncio.create_task(raw.eval("while true do end", 0))

    async def is_refused_as_busy() -> bool:
        try:
            await redis_store.heartbeat("engine:a", b"", 1)
        except StoreUnavailable as error:
            return "BUSY" in str(error)
        return False

    try:
        await eventually(is_refused_as_busy)
    finally:
        await raw.script_kill()
        await asyncio.gather(busy, return_exceptions=True)
        await raw.config_set("lua-time-limit", 5000)
    await redis_store.ping()


async def test_a_redis_that_dies_is_noticed_and_the_same_store_goes_on_when_it_is_back() -> None:
    async with embedded_redis() as server:
        store = RedisStore.from_url(server.url, timeout_s=1.0)
        await write(store, "plan", b"before")
        watch = store.watch("plan", poll_s=0.2)
        assert (await following(watch)).value == b"before"
        rest = asyncio.create_task(following(watch))

        await server.kill()
        for call in (store.get("plan"), write(store, "plan", b""), store.append("requests", [b""], 1), store.ping()):
            with pytest.raises(StoreUnavailable):
                async with asyncio.timeout(LIVENESS_S):
                    await call
        assert not rest.done()

        await server.start()
        await write(store, "plan", b"after")
        await store.append("requests", [b"after"], 10)
        assert await rest == Versioned(1, b"after")
        await write(store, "plan", b"and on")
        assert await following(watch) == Versioned(2, b"and on")
        assert [entry.value for entry in await store.read("requests", None, 10)] == [b"after"]
        await store.aclose()


async def test_a_redis_that_came_back_empty_refuses_the_holder_of_a_lease_it_no_longer_knows() -> None:
    async with embedded_redis() as server:
        store = RedisStore.from_url(server.url)
        old = await lease_of(store, "a")
        await server.kill()
        await server.start()
        with pytest.raises(LostLease):
            await store.compare_and_set("plan", b"stale", None, old)
        assert await lease_of(store, "b") == Lease("leader", "b", 1)
        with pytest.raises(LostLease):
            await store.compare_and_set("plan", b"stale", None, old)
        await store.aclose()


async def test_a_redis_that_is_stuck_makes_no_call_hang_and_the_store_recovers() -> None:
    async with embedded_redis() as server:
        store = RedisStore.from_url(server.url, timeout_s=0.2)
        await store.compare_and_set("plan", b"1", None)
        watch = store.watch("plan", poll_s=0.1)
        await following(watch)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for call in (store.get("plan"), store.alive(""), store.read("requests", None, 1, block_s=0.1)):
                with pytest.raises(StoreUnavailable):
                    async with asyncio.timeout(LIVENESS_S):
                        await call
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await store.compare_and_set("plan", b"2", 1)
        assert await following(watch) == Versioned(2, b"2")
        await store.aclose()


async def test_a_blocking_read_ends_when_redis_dies() -> None:
    async with embedded_redis() as server:
        store = RedisStore.from_url(server.url)
        reading = asyncio.create_task(store.read("requests", None, 1, block_s=1000))
        await asyncio.sleep(0.1)
        await server.kill()
        with pytest.raises(StoreUnavailable):
            async with asyncio.timeout(LIVENESS_S):
                await reading
        await store.aclose()


async def test_a_call_that_is_cancelled_does_not_answer_the_next_one(redis_store: RedisStore) -> None:
    await redis_store.compare_and_set("plan", b"1", None)
    for _ in range(50):
        abandoned = asyncio.create_task(redis_store.compare_and_set("other", b"x" * 100_000, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        abandoned.cancel()
        assert await redis_store.get("plan") == Versioned(1, b"1")
    await asyncio.gather(abandoned, return_exceptions=True)
