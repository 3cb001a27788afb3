"""One leader among several controllers, on a clock that is turned by hand."""

import asyncio
from dataclasses import dataclass, field

import pytest

from controller.leadership import Leadership
from controller.store import Lease, LostLease, MemoryStore, StoreUnavailable

LEASE_S = 10.0


@dataclass
class World:
    """A store and controllers that share one clock; `away` makes the store fail."""

    now_s: float = 100.0
    away: bool = False
    store: MemoryStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(now_s=lambda: self.now_s)
        ask = self.store.lease

        async def lease(key: str, holder: str, ttl_s: float) -> Lease | None:
            if self.away:
                raise StoreUnavailable("gone")
            return await ask(key, holder, ttl_s)

        self.store.lease = lease  # type: ignore[method-assign]

    def controller(self, name: str) -> Leadership:
        return Leadership(self.store, "leader", name, LEASE_S, lambda: self.now_s)


@pytest.fixture
def world() -> World:
    return World()


async def test_the_first_leads_and_the_second_stands_by(world: World) -> None:
    first, second = world.controller("a"), world.controller("b")
    await first.look()
    await second.look()
    assert (first.lease, second.lease) == (Lease("leader", "a", 1), None)
    assert (first.times, second.times) == (1, 0)


async def test_whoever_keeps_looking_keeps_leading_under_one_token(world: World) -> None:
    first, second = world.controller("a"), world.controller("b")
    for _ in range(50):
        await first.look()
        await second.look()
        assert first.lease == Lease("leader", "a", 1)
        assert second.lease is None
        world.now_s += 1


async def test_a_leader_that_dies_is_replaced_within_one_lease(world: World) -> None:
    first, second = world.controller("a"), world.controller("b")
    await first.look()
    died_s = world.now_s
    while second.lease is None:
        world.now_s += LEASE_S / 10
        await second.look()
    assert second.lease == Lease("leader", "b", 2)
    assert world.now_s - died_s <= LEASE_S + 1e-9


async def test_there_are_never_two_leaders(world: World) -> None:
    first, second = world.controller("a"), world.controller("b")
    await first.look()
    for _ in range(40):  # the first no longer looks
        world.now_s += LEASE_S / 40
        await second.look()
        assert not (first.lease and second.lease)
    assert second.lease is not None


async def test_a_leader_that_hears_nothing_of_the_store_stops_leading_when_its_lease_is_over(world: World) -> None:
    leader = world.controller("a")
    await leader.look()
    world.away = True
    for _ in range(8):
        world.now_s += 1
        await leader.look()
        assert leader.lease is not None
    world.now_s += 1
    await leader.look()
    assert leader.lease is None
    world.away = False
    await leader.look()
    assert leader.lease == Lease("leader", "a", 2)
    assert leader.times == 2


async def test_a_leader_whose_lease_another_has_taken_cannot_write(world: World) -> None:
    first, second = world.controller("a"), world.controller("b")
    await first.look()
    held = first.lease
    world.now_s += LEASE_S
    await second.look()
    with pytest.raises(LostLease):
        await world.store.compare_and_set("plan", b"late", None, held)


async def test_a_leader_that_leaves_lets_go_at_once(world: World) -> None:
    first, second = world.controller("a"), world.controller("b")
    running = asyncio.create_task(first.run())
    while first.lease is None:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    await second.look()
    assert second.lease == Lease("leader", "b", 2)
