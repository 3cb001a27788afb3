"""Documents with versions, and watches on them."""

import asyncio

import pytest

from controller.store import (
    Store,
    VersionConflict,
    Versioned,
)
from tests.support.stores import EVERY_BYTE, following


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
