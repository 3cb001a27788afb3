"""One suite for every store: memory, Redis, and Redis's imitation where it is cheap. Then what only Redis can do."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import structlog
from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis

from controller.stack.embedded import embedded_redis
from controller.store import (
    Lease,
    LostLease,
    MemoryStore,
    RedisStore,
    Store,
    StoreUnavailable,
    VersionConflict,
    Versioned,
    open_store,
)

LIVENESS_S = 20.0
EVERY_BYTE = bytes(range(256)) + b"\r\n\x00\r\n"


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


# Documents


async def test_an_absent_document_is_none(store: Store) -> None:
    assert await store.get("plan") is None


async def test_versions_start_at_1_and_have_no_gaps(store: Store) -> None:
    versions = [await store.compare_and_set("plan", b"%d" % i, i or None) for i in range(12)]
    assert versions == list(range(1, 13))
    assert await store.get("plan") == Versioned(12, b"11")


async def test_a_conflict_tells_the_actual_version_and_writes_nothing(store: Store) -> None:
    await store.compare_and_set("plan", b"first", None)
    for expected in (None, 0, 2):
        with pytest.raises(VersionConflict) as caught:
            await store.compare_and_set("plan", b"lost", expected)
        assert (caught.value.expected, caught.value.actual) == (expected, 1)
    assert await store.get("plan") == Versioned(1, b"first")


async def test_a_conflict_on_an_absent_document_creates_nothing(store: Store) -> None:
    with pytest.raises(VersionConflict) as caught:
        await store.compare_and_set("plan", b"lost", 3)
    assert caught.value.actual is None
    assert await store.get("plan") is None


async def test_of_20_writers_that_expect_the_same_version_one_wins(store: Store) -> None:
    attempts = [store.compare_and_set("plan", b"%d" % i, None) for i in range(20)]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    winners = [i for i, result in enumerate(results) if result == 1]
    losers = [result.actual for result in results if isinstance(result, VersionConflict)]
    assert (len(winners), losers) == (1, [1] * 19)
    assert await store.get("plan") == Versioned(1, b"%d" % winners[0])


async def test_20_writers_that_repeat_until_they_win_lose_no_update(store: Store) -> None:
    async def add_one() -> int:
        while True:
            current = await store.get("count")
            value, version = (int(current.value), current.version) if current else (0, None)
            try:
                return await store.compare_and_set("count", b"%d" % (value + 1), version)
            except VersionConflict:
                await asyncio.sleep(0)

    versions = await asyncio.gather(*(add_one() for _ in range(20)))
    assert sorted(versions) == list(range(1, 21))
    assert await store.get("count") == Versioned(20, b"20")


@pytest.mark.parametrize("value", [b"", EVERY_BYTE, b"x" * 1_000_000], ids=["empty", "every byte", "1 MB"])
async def test_values_are_any_bytes(store: Store, value: bytes) -> None:
    await store.compare_and_set("plan", value, None)
    await store.append("requests", [value], 10)
    await store.heartbeat("engine:a", value, 60)
    assert await store.get("plan") == Versioned(1, value)
    assert [entry.value for entry in await store.latest("requests", 1)] == [value]
    assert await store.alive("engine:") == {"engine:a": value}


# Watches


async def test_a_watch_gives_the_document_as_it_is_then_each_change(store: Store) -> None:
    await store.compare_and_set("plan", b"1", None)
    watch = store.watch("plan")
    assert await following(watch) == Versioned(1, b"1")
    for version in (2, 3):
        await store.compare_and_set("plan", b"%d" % version, version - 1)
        assert await following(watch) == Versioned(version, b"%d" % version)


async def test_a_watch_waits_for_a_document_that_is_not_there_yet(store: Store) -> None:
    waiting = asyncio.create_task(following(store.watch("plan")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.compare_and_set("plan", b"at last", None)
    assert await waiting == Versioned(1, b"at last")


async def test_a_watch_that_is_not_read_for_a_while_skips_to_the_newest(store: Store) -> None:
    watch = store.watch("plan", poll_s=0.05)
    await store.compare_and_set("plan", b"1", None)
    assert (await following(watch)).version == 1
    for version in range(2, 102):
        await store.compare_and_set("plan", b"%d" % version, version - 1)
    seen = [await following(watch)]
    while seen[-1].version < 101:
        seen.append(await following(watch))
    versions = [document.version for document in seen]
    assert versions == sorted(set(versions))
    assert len(versions) < 50


async def test_a_watch_gives_nothing_twice(store: Store) -> None:
    await store.compare_and_set("plan", b"1", None)
    watch = store.watch("plan", poll_s=0.02)
    assert (await following(watch)).version == 1
    again = asyncio.create_task(following(watch))
    await asyncio.sleep(0.3)  # many polls
    assert not again.done()
    await store.compare_and_set("plan", b"2", 1)
    assert (await again).version == 2


async def test_watches_see_their_own_key_only_and_all_that_watch_a_key_see_it(store: Store) -> None:
    first, second, other = store.watch("plan"), store.watch("plan"), store.watch("slo")
    await store.compare_and_set("slo", b"slo", None)
    await store.compare_and_set("plan", b"plan", None)
    assert [await following(watch) for watch in (first, second)] == [Versioned(1, b"plan")] * 2
    assert await following(other) == Versioned(1, b"slo")


# Streams


async def test_an_unknown_stream_is_empty(store: Store) -> None:
    assert list(await store.read("requests", None, 10)) == []
    assert list(await store.latest("requests", 10)) == []


async def test_entries_come_in_the_order_in_which_they_were_appended(store: Store) -> None:
    await store.append("requests", [b"a", b"b"], 100)
    await store.append("requests", [], 100)
    await store.append("requests", [b"c"], 100)
    entries = await store.read("requests", None, 10)
    assert [entry.value for entry in entries] == [b"a", b"b", b"c"]
    assert len({entry.id for entry in entries}) == 3


async def test_reading_goes_on_after_the_last_id_and_takes_no_more_than_asked(store: Store) -> None:
    await store.append("requests", [b"%d" % i for i in range(7)], 100)
    pages, after = [], None
    while page := await store.read("requests", after, 3):
        pages.append([entry.value for entry in page])
        after = page[-1].id
    assert pages == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"]]


async def test_the_latest_entries_come_oldest_first(store: Store) -> None:
    await store.append("requests", [b"%d" % i for i in range(7)], 100)
    assert [entry.value for entry in await store.latest("requests", 3)] == [b"4", b"5", b"6"]


async def test_one_can_page_backwards(store: Store) -> None:
    await store.append("requests", [b"%d" % i for i in range(7)], 100)
    pages, before = [], None
    while page := await store.latest("requests", 3, before):
        pages.append([entry.value for entry in page])
        before = page[0].id
    assert pages == [[b"4", b"5", b"6"], [b"1", b"2", b"3"], [b"0"]]


async def test_a_stream_is_trimmed_to_about_its_length_and_never_below(store: Store) -> None:
    for batch in range(10):
        await store.append("requests", [b"%d" % (100 * batch + i) for i in range(100)], 200)
    kept = [int(entry.value) for entry in await store.read("requests", None, 10_000)]
    assert 200 <= len(kept) <= 400
    assert kept == list(range(1000 - len(kept), 1000))


async def test_reading_after_an_entry_that_was_trimmed_away_starts_with_the_oldest(store: Store) -> None:
    await store.append("requests", [b"old"], 100)
    gone = (await store.latest("requests", 1))[0].id
    await store.append("requests", [b"%d" % i for i in range(1000)], 100)
    oldest = await store.read("requests", None, 1)
    assert oldest[0].value != b"old"
    assert await store.read("requests", gone, 1) == oldest


async def test_a_blocking_read_returns_as_soon_as_there_is_an_entry(store: Store) -> None:
    await store.append("requests", [b"old"], 100)
    last = (await store.latest("requests", 1))[0].id
    reading = asyncio.create_task(store.read("requests", last, 10, block_s=1000))
    await asyncio.sleep(0.05)
    assert not reading.done()
    await store.append("requests", [b"new"], 100)
    async with asyncio.timeout(LIVENESS_S):
        assert [entry.value for entry in await reading] == [b"new"]


async def test_a_blocking_read_gives_up_empty_handed(store: Store) -> None:
    async with asyncio.timeout(LIVENESS_S):
        assert list(await store.read("requests", None, 10, block_s=0.05)) == []


# Heartbeats


async def test_alive_gives_the_last_word_of_those_under_the_prefix_only(store: Store) -> None:
    await store.heartbeat("m:engine:a", b"old", 60)
    await store.heartbeat("m:engine:a", b"new", 60)
    await store.heartbeat("m:engine:b", b"b", 60)
    await store.heartbeat("m:router:a", b"router", 60)
    await store.compare_and_set("m:engine:document", b"{}", None)
    await store.append("m:engine:stream", [b"{}"], 10)
    assert await store.alive("m:engine:") == {"m:engine:a": b"new", "m:engine:b": b"b"}
    assert await store.alive("nobody:") == {}


async def test_a_prefix_is_taken_as_it_is_written(store: Store) -> None:
    for key in ("m[1]*?\\:engine:a", "m1*?\\:engine:a", "m[1]xx\\:engine:a"):
        await store.heartbeat(key, b"x", 60)
    assert list(await store.alive("m[1]*?\\:")) == ["m[1]*?\\:engine:a"]


async def test_alive_finds_hundreds(store: Store) -> None:
    for i in range(300):
        await store.heartbeat(f"engine:{i}", b"%d" % i, 60)
    assert await store.alive("engine:") == {f"engine:{i}": b"%d" % i for i in range(300)}


async def test_a_heartbeat_that_stops_vanishes_and_another_stays(store: Store) -> None:
    await store.heartbeat("engine:stopped", b"", 0.05)
    await store.heartbeat("engine:beating", b"", 60)

    async def only_one_is_left() -> bool:
        return set(await store.alive("engine:")) == {"engine:beating"}

    await eventually(only_one_is_left)


async def test_who_leaves_is_forgotten_at_once(store: Store) -> None:
    await store.heartbeat("engine:a", b"", 60)
    await store.forget("engine:a")
    await store.forget("engine:never-there")
    assert await store.alive("engine:") == {}


async def test_in_memory_heartbeats_expire_by_the_clock_that_was_given() -> None:
    now_s = 100.0
    store = MemoryStore(now_s=lambda: now_s)
    await store.heartbeat("engine:a", b"", 5)
    now_s = 104.9
    assert "engine:a" in await store.alive("engine:")
    now_s = 105.0
    assert await store.alive("engine:") == {}


# Leases


async def lease_of(store: Store, holder: str, ttl_s: float = 60) -> Lease:
    lease = await store.lease("leader", holder, ttl_s)
    assert lease is not None
    return lease


async def test_a_lease_has_one_holder(store: Store) -> None:
    assert await store.lease("leader", "a", 60) == Lease("leader", "a", 1)
    assert await store.lease("leader", "b", 60) is None
    assert await store.lease("other", "b", 60) == Lease("other", "b", 1)


async def test_of_20_that_ask_at_once_one_gets_the_lease(store: Store) -> None:
    answers = await asyncio.gather(*(store.lease("leader", f"holder-{i}", 60) for i in range(20)))
    assert len([lease for lease in answers if lease is not None]) == 1


async def test_renewing_keeps_the_token_and_the_lease(store: Store) -> None:
    first = await lease_of(store, "a", 0.4)
    for _ in range(8):
        await asyncio.sleep(0.1)
        assert await store.lease("leader", "a", 0.4) == first
        assert await store.lease("leader", "b", 0.4) is None


async def test_the_token_grows_with_every_change_of_holder_and_across_expiry(store: Store) -> None:
    tokens = [(await lease_of(store, "a", 0.02)).token]
    for holder in ("b", "a", "a"):
        await asyncio.sleep(0.1)
        tokens.append((await lease_of(store, holder, 0.02)).token)
    assert tokens == [1, 2, 3, 4]


async def test_a_released_lease_is_free_at_once_and_its_token_is_not_given_again(store: Store) -> None:
    await store.release(await lease_of(store, "a"))
    assert await lease_of(store, "b") == Lease("leader", "b", 2)


async def test_releasing_what_one_no_longer_holds_changes_nothing(store: Store) -> None:
    old = await lease_of(store, "a")
    await store.release(old)
    await lease_of(store, "b")
    await store.release(old)
    await store.release(Lease("leader", "b", 1))
    await store.release(Lease("never", "b", 1))
    assert await store.lease("leader", "a", 60) is None


async def test_a_guarded_write_of_the_holder_is_a_write(store: Store) -> None:
    lease = await lease_of(store, "a")
    assert await store.compare_and_set("plan", b"1", None, lease) == 1
    with pytest.raises(VersionConflict) as caught:
        await store.compare_and_set("plan", b"lost", None, lease)
    assert caught.value.actual == 1
    assert await store.compare_and_set("plan", b"2", 1, lease) == 2


async def test_a_guarded_write_without_the_lease_is_refused_and_writes_nothing(store: Store) -> None:
    old = await lease_of(store, "a")
    await store.release(old)
    new = await lease_of(store, "b")
    forged = (old, Lease("leader", "b", 1), Lease("leader", "a", 2), Lease("never", "b", 2))
    for fence in forged:
        with pytest.raises(LostLease, match=fence.holder):
            await store.compare_and_set("plan", b"stale", None, fence)
    assert await store.get("plan") is None
    await store.release(new)
    with pytest.raises(LostLease):
        await store.compare_and_set("plan", b"stale", None, new)


async def test_a_guarded_write_under_a_lease_that_ran_out_is_refused_though_nobody_took_it(store: Store) -> None:
    lease = await lease_of(store, "a", 0.02)
    await asyncio.sleep(0.1)
    with pytest.raises(LostLease):
        await store.compare_and_set("plan", b"late", None, lease)


async def test_an_unguarded_write_needs_no_lease(store: Store) -> None:
    await lease_of(store, "a")
    assert await store.compare_and_set("plan", b"operator's", None) == 1


async def test_in_memory_leases_expire_by_the_clock_that_was_given() -> None:
    now_s = 100.0
    store = MemoryStore(now_s=lambda: now_s)
    await lease_of(store, "a", 5)
    now_s = 104.9
    assert await store.lease("leader", "b", 5) is None
    now_s = 105.0
    assert await lease_of(store, "b", 5) == Lease("leader", "b", 2)


# Closing


async def test_a_closed_store_answers_nothing_and_may_be_closed_again(store: Store) -> None:
    await store.aclose()
    await store.aclose()
    calls = [
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
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * len(calls)


async def test_closing_ends_watches(store: Store) -> None:
    await store.compare_and_set("plan", b"1", None)
    idle, waiting = store.watch("plan", poll_s=1000), store.watch("plan", poll_s=1000)
    await following(idle)
    await following(waiting)
    rest = asyncio.create_task(following(waiting))
    await asyncio.sleep(0.05)
    await store.aclose()
    for ended in (rest, following(idle), following(store.watch("plan"))):
        with pytest.raises(StopAsyncIteration):
            await ended


@pytest.mark.parametrize("url", ["", "redis", "http://127.0.0.1:1", "memory:", "memory://x"])
def test_an_address_that_is_no_stores_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis://host:port"):
        open_store(url)


# Redis only


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


@pytest.fixture
async def limited(redis_url: str, raw: Redis) -> AsyncIterator[RedisStore]:
    """A store whose user may do nothing; `raw` can grant it something."""
    await raw.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pass", "+client")
    made = RedisStore.from_url(redis_url.replace("redis://", "redis://limited:pass@"))
    yield made
    await made.aclose()
    await raw.execute_command("ACL", "DELUSER", "limited")


async def test_a_redis_that_refuses_a_command_is_unavailable_to_every_method(limited: RedisStore) -> None:
    calls = [
        limited.get("plan"),
        limited.compare_and_set("plan", b"", None),
        limited.append("requests", [b""], 10),
        limited.read("requests", None, 1),
        limited.latest("requests", 1),
        limited.heartbeat("engine:a", b"", 1),
        limited.alive("engine:"),
        limited.forget("engine:a"),
        limited.lease("leader", "a", 1),
        limited.release(Lease("leader", "a", 1)),
        limited.ping(),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [StoreUnavailable] * len(calls)


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
