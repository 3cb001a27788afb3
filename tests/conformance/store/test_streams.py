"""Streams and heartbeats."""

import asyncio

from controller.store import (
    MemoryStore,
    Store,
)
from tests.support.stores import LIVENESS_S, eventually


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
