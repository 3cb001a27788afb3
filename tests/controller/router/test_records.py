"""Records on their way to a store that fails now and then."""

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import RouterMetrics
from controller.router.records import Recorder
from controller.store import MemoryStore, StoreUnavailable
from engines.records import Outcome, RequestRecord

LIVENESS_S = 20.0


class FlakyStore(MemoryStore):
    away = False

    async def append(self, stream: str, values: Sequence[bytes], max_len: int) -> None:
        if self.away:
            raise StoreUnavailable("Redis refuses: MISCONF")
        await super().append(stream, values, max_len)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


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
    recorder = Recorder(store, "requests", 10, RouterMetrics(registry))
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
    entries = await store.read("requests", None, 10)
    assert [f"r{number}".encode() in entry.value for number, entry in enumerate(entries)] == [True] * 3
    assert registry.get_sample_value("trimtab_store_up") == 1


async def test_the_oldest_records_are_dropped_and_counted_when_there_are_too_many(registry: CollectorRegistry) -> None:
    store = FlakyStore()
    recorder = Recorder(store, "requests", 2, RouterMetrics(registry))
    for number in range(5):
        recorder.put(record(number))
    await recorder.flush()
    kept = [entry.value for entry in await store.read("requests", None, 10)]
    assert [b"r3" in kept[0], b"r4" in kept[1], len(kept)] == [True, True, 2]
    assert registry.get_sample_value("trimtab_records_lost_total") == 3
