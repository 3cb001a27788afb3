"""What an engine tells Redis, and what it does when Redis is not there."""

import asyncio
import contextlib

import msgspec
import pytest
from redis.asyncio import Redis

from controller.stack.embedded import embedded_redis
from controller.store.keys import Keys
from engines.records import PassRecord, TransferRecord
from engines.telemetry import EngineKeys, Heartbeat, Recorder, Telemetry, connect
from engines.types import EngineInfo, EngineLoad, KvLayout

LAYOUT = KvLayout(model="m", dtype="float16", layers=1, kv_heads=1, head_dim=8)
INFO = EngineInfo(
    engine_id="e1",
    url="http://127.0.0.1:1",
    kind="laptop",
    model="m",
    context_length_tokens=100,
    kv_capacity_tokens=200,
    kv_layout=LAYOUT,
    transports=("tcp",),
    epoch="1",
)


def a_pass(queued: int = 0) -> PassRecord:
    return PassRecord(
        engine_id="e1",
        kind="laptop",
        at_s=1.0,
        wall_s=0.1,
        prefill_tokens=1,
        prefill_context_tokens=1,
        decode_batch=0,
        kv_tokens=0,
        queued=queued,
    )


def a_transfer() -> TransferRecord:
    return TransferRecord(engine_id="e1", kind="laptop", at_s=1.0, wall_s=0.1, bytes=5, concurrent=1)


@pytest.fixture
async def redis(redis_url):
    async with connect(redis_url) as client:
        yield client


def telemetry(redis: Redis, recorder: Recorder, heartbeat_s: float = 0.05) -> Telemetry:
    return Telemetry(redis, INFO, lambda: EngineLoad(running=3), recorder, heartbeat_s)


@contextlib.asynccontextmanager
async def running(service: Telemetry):
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(holds, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await holds():
            await asyncio.sleep(0.01)


def test_names_are_those_the_controller_reads():
    assert EngineKeys("m", "e1").heartbeat == Keys("m").engine("e1")
    assert EngineKeys("m", "e1").passes == Keys("m").passes


async def test_a_heartbeat_carries_info_and_load_and_expires(redis):
    await telemetry(redis, Recorder(), heartbeat_s=5).publish()
    beat = msgspec.json.decode(await redis.get("trimtab:m:engine:e1"), type=Heartbeat)
    assert beat == Heartbeat(info=INFO, load=EngineLoad(running=3))
    assert 10_000 < await redis.pttl("trimtab:m:engine:e1") <= 15_000


async def test_records_arrive_once_each_in_the_stream_of_their_kind(redis):
    recorder = Recorder()
    recorder.add_pass(a_pass(1))
    recorder.add_transfer(a_transfer())
    recorder.add_pass(a_pass(2))
    service = telemetry(redis, recorder)
    await service.publish()
    await service.publish()
    passes = [entry[b"value"] for _, entry in await redis.xrange("trimtab:m:passes")]
    assert [msgspec.json.decode(entry, type=PassRecord) for entry in passes] == [a_pass(1), a_pass(2)]
    transfers = [entry[b"value"] for _, entry in await redis.xrange("trimtab:m:transfers")]
    assert [msgspec.json.decode(entry, type=TransferRecord) for entry in transfers] == [a_transfer()]


async def test_a_clean_stop_removes_the_heartbeat(redis):
    async def is_there() -> bool:
        return bool(await redis.exists("trimtab:m:engine:e1"))

    async with running(telemetry(redis, Recorder())):
        await until(is_there)
    assert not await is_there()


async def test_an_engine_outlives_redis_and_speaks_again_when_it_is_back(free_port):
    port, recorder = free_port(), Recorder()
    async with connect(f"redis://127.0.0.1:{port}/0") as client:
        service = telemetry(client, recorder)
        async with running(service):

            async def has_failed() -> bool:
                return service.failures > 1

            await until(has_failed)
            recorder.add_pass(a_pass())
            async with embedded_redis(port=port):

                async def is_back() -> bool:
                    return bool(await client.exists("trimtab:m:engine:e1")) and bool(
                        await client.xlen("trimtab:m:passes")
                    )

                await until(is_back)


def test_the_buffer_is_bounded_and_counts_what_it_lost():
    recorder = Recorder(max_records=3)
    for queued in range(5):
        recorder.add_pass(a_pass(queued))
    assert recorder.dropped == 2
    assert recorder.take() == [a_pass(2), a_pass(3), a_pass(4)]
    assert recorder.take() == []


def test_undelivered_records_come_back_in_order_as_far_as_there_is_room():
    recorder = Recorder(max_records=3)
    for queued in range(3):
        recorder.add_pass(a_pass(queued))
    taken = recorder.take()
    recorder.add_pass(a_pass(3))
    recorder.put_back(taken)
    assert recorder.dropped == 1
    assert recorder.take() == [a_pass(1), a_pass(2), a_pass(3)]
