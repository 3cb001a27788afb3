"""Following a stream by position, also through a store that began anew."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from controller.store import MemoryStore, Store
from controller.streams import StreamReader


class Number(msgspec.Struct):
    n: int


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    yield made
    await made.aclose()


async def add(store: Store, *numbers: int) -> None:
    await store.append("numbers", [msgspec.json.encode(Number(n)) for n in numbers], 100_000)


async def read(reader: StreamReader[Number]) -> list[int]:
    return [number.n async for page in reader.news() for number in page]


async def test_each_entry_is_read_once_and_in_order(store: Store) -> None:
    reader = StreamReader(store, "numbers", Number)
    assert await read(reader) == []
    await add(store, 1, 2)
    assert await read(reader) == [1, 2]
    assert await read(reader) == []
    await add(store, *range(3, 2000))
    assert await read(reader) == list(range(3, 2000))
    assert reader.read == 1999


async def test_a_new_reader_begins_with_what_is_there(store: Store) -> None:
    await add(store, 1, 2)
    assert await read(StreamReader(store, "numbers", Number)) == [1, 2]


async def test_what_cannot_be_decoded_is_counted_and_does_not_stop_the_rest(store: Store) -> None:
    reader = StreamReader(store, "numbers", Number)
    await store.append("numbers", [b"{", b'{"n": "x"}', b"\xff", b'{"n": 7}'], 100)
    assert await read(reader) == [7]
    assert (reader.read, reader.malformed) == (1, 3)


async def test_a_stream_that_began_anew_is_read_from_its_start(store: Store) -> None:
    reader = StreamReader(store, "numbers", Number)
    await add(store, *range(10))
    await read(reader)
    empty = MemoryStore()
    reader._store = empty
    assert await read(reader) == []
    await add(empty, 100, 101)
    assert await read(reader) == [100, 101]
    assert await read(reader) == []
    await empty.aclose()
