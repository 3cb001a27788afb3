"""Leases and writes that they guard."""

import asyncio

import pytest

from controller.store import (
    Lease,
    LostLease,
    MemoryStore,
    Store,
    VersionConflict,
)
from tests.support.stores import lease_of


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
