"""Records on their way to a store that fails now and then."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import RouterMetrics
from controller.router.records import BATCH, Arrival, Recorder
from controller.store import Keys, MemoryStore, StoreUnavailable
from engines.records import ArrivalBatch, Outcome, RequestRecord
from tuner.prefix import BLOCK_BYTES, block_hashes

LIVENESS_S = 20.0
KEYS = Keys("model")
WALL_OFFSET_S = 1_700_000_000.0


class FlakyStore(MemoryStore):
    away = False

    async def append(self, stream: str, values: Sequence[bytes], max_len: int) -> None:
        if self.away:
            raise StoreUnavailable("Redis refuses: MISCONF")
        await super().append(stream, values, max_len)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def recorder_for(store: MemoryStore, capacity: int, registry: CollectorRegistry) -> Recorder:
    return Recorder(store, KEYS, "router", capacity, RouterMetrics(registry), lambda: WALL_OFFSET_S)


def arrival(number: int, prompt: bytes = b"") -> Arrival:
    return (f"r{number}", float(number), 10 + number, len(prompt), "default", 3, block_hashes(prompt))


async def sent_arrivals(store: MemoryStore) -> list[ArrivalBatch]:
    entries = await store.read(KEYS.arrivals, None, 1000)
    return [msgspec.json.decode(entry.value, type=ArrivalBatch) for entry in entries]


def record(number: int) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{number}",
        router_id="router",
        slo_class="default",
        arrived_at_s=0.0,
        outcome=Outcome.OK,
        status=200,
        api="chat",
        stream=True,
        pattern="balanced",
        plan_version=1,
        e2e_s=1.0,
    )


async def test_records_wait_for_a_store_that_is_away_and_arrive_in_order(registry: CollectorRegistry) -> None:
    store = FlakyStore()
    recorder = recorder_for(store, 10, registry)
    store.away = True
    running = asyncio.create_task(recorder.run(every_s=0.01))
    for number in range(3):
        recorder.put(record(number))
    async with asyncio.timeout(LIVENESS_S):
        while registry.get_sample_value("trimtab_store_up") != 0 or not len(recorder):
            await asyncio.sleep(0.01)
    assert (len(recorder), running.done()) == (3, False)
    store.away = False
    async with asyncio.timeout(LIVENESS_S):
        while len(recorder):
            await asyncio.sleep(0.01)
    running.cancel()
    entries = await store.read(KEYS.requests, None, 10)
    assert [f"r{number}".encode() in entry.value for number, entry in enumerate(entries)] == [True] * 3
    assert registry.get_sample_value("trimtab_store_up") == 1


async def test_the_oldest_records_are_dropped_and_counted_when_there_are_too_many(registry: CollectorRegistry) -> None:
    store = FlakyStore()
    recorder = recorder_for(store, 2, registry)
    for number in range(5):
        recorder.put(record(number))
    await recorder.flush()
    kept = [entry.value for entry in await store.read(KEYS.requests, None, 10)]
    assert [b"r3" in kept[0], b"r4" in kept[1], len(kept)] == [True, True, 2]
    assert registry.get_sample_value("trimtab_records_lost_total") == 3


async def test_arrivals_go_out_as_columns_with_unix_times_before_any_of_them_has_ended(
    registry: CollectorRegistry,
) -> None:
    store = FlakyStore()
    recorder = recorder_for(store, 10, registry)
    recorder.arrived(arrival(0))
    recorder.arrived(arrival(1, b"x" * (2 * BLOCK_BYTES)))
    await recorder.flush()
    (batch,) = await sent_arrivals(store)
    assert (batch.router_id, batch.request_ids) == ("router", ("r0", "r1"))
    assert batch.arrived_at_s == (WALL_OFFSET_S, WALL_OFFSET_S + 1)
    assert (batch.prompt_tokens, batch.prompt_bytes) == ((10, 11), (0, 2 * BLOCK_BYTES))
    assert (batch.slo_classes, batch.plan_versions) == (("default",) * 2, (3, 3))
    assert [len(hashes) for hashes in batch.prefix_hashes] == [0, 2]


async def test_many_arrivals_are_cut_into_entries_of_bounded_size(registry: CollectorRegistry) -> None:
    store = FlakyStore()
    recorder = recorder_for(store, 10_000, registry)
    for number in range(2 * BATCH + 1):
        recorder.arrived(arrival(number))
    await recorder.flush()
    assert [len(batch.request_ids) for batch in await sent_arrivals(store)] == [BATCH, BATCH, 1]


async def test_arrivals_wait_for_the_store_and_the_oldest_give_way_and_are_counted(
    registry: CollectorRegistry,
) -> None:
    store = FlakyStore()
    recorder = recorder_for(store, 2, registry)
    store.away = True
    for number in range(3):
        recorder.arrived(arrival(number))
    await recorder.flush()
    store.away = False
    await recorder.flush()
    await recorder.flush()
    assert [batch.request_ids for batch in await sent_arrivals(store)] == [("r1", "r2")]
    assert registry.get_sample_value("trimtab_arrivals_lost_total") == 1


async def test_without_a_store_nothing_is_kept(registry: CollectorRegistry) -> None:
    recorder = Recorder(None, KEYS, "router", 2, RouterMetrics(registry), lambda: 0.0)
    for number in range(2):
        recorder.arrived(arrival(number))
        recorder.put(record(number))
    await recorder.flush()
    recorder.arrived(arrival(3))
    assert len(recorder) == 0
    assert registry.get_sample_value("trimtab_arrivals_lost_total") == 0
