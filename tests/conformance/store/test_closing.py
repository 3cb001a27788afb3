"""Stores that are closed, and addresses that are none."""

import asyncio

import pytest

from controller.store import (
    Store,
    StoreUnavailable,
    open_store,
)
from tests.support.stores import answers_of, following


async def test_a_closed_store_answers_nothing_and_may_be_closed_again(store: Store) -> None:
    await store.aclose()
    await store.aclose()
    assert {type(each) for each in await answers_of(store)} == {StoreUnavailable}


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


def test_a_refused_address_is_not_repeated_with_its_password() -> None:
    with pytest.raises(ValueError, match="reddis://") as refused:
        open_store("reddis://operator:s3cret@127.0.0.1:1/0")
    assert "s3cret" not in str(refused.value)
