"""The reference simulator as a world that goes on: arrivals, plans and engines change while time passes."""

import numpy as np
import pytest

from controller.router.call import RESERVATION_TTL_S
from controller.settings import Limits, RouterSettings
from engines.errors import ContextTooLong
from engines.records import Outcome
from tuner.prefix import BLOCK_BYTES
from tuner.twin import limits
from tuner.twin.reference import ReferenceFleet


@pytest.fixture
def world(make):
    return ReferenceFleet(make.fleet(4), make.plan(), make.slos(), keep_samples=True)


def test_it_imitates_the_router_that_is_there():
    settings = RouterSettings(model="m", engines=("http://127.0.0.1:1",))
    assert settings.load_poll_s == limits.POLL_S
    assert (Limits().queue, Limits().queue_s) == (limits.QUEUE, limits.QUEUE_S)
    assert RESERVATION_TTL_S == limits.RESERVATION_TTL_S
    assert BLOCK_BYTES == 4 * limits.BLOCK_TOKENS


def test_every_request_ends_once_and_no_room_is_lost(make):
    plan = make.plan("disaggregated", make.roles(4, 2), policy="prefix_affinity")
    world = ReferenceFleet(make.fleet(4, kv_capacity_tokens=20_000), plan, make.slos())
    work = make.conversations(300, 25.0, 30)
    world.offer(work)
    rows = []
    while len(rows) < len(work):
        rows += [record.row for record in world.advance(world.now_s + 1.0)]
        world.check()
    assert sorted(rows) == list(range(len(work)))
    assert world.open == 0
    for engine in world.engines:
        load = engine.kernel.load()
        assert (load.running, load.queued, load.kv_used_tokens, load.kv_reserved_tokens) == (0, 0, 0, 0)
        assert (engine.own_inflight, engine.own_pending_tokens, engine.own_transfers) == (0, 0, 0)


def test_steps_of_any_size_give_the_same_records(make):
    work = make.workload(200, 40.0)
    whole, stepped = (ReferenceFleet(make.fleet(4), make.plan(), make.slos()) for _ in range(2))
    whole.offer(work)
    stepped.offer(work)
    expected = whole.advance()
    found = []
    while len(found) < len(expected):
        found += stepped.advance(stepped.now_s + 0.37)
    assert found == expected


def test_time_passes_without_requests_too(world):
    assert world.advance(12.5) == []
    assert world.now_s == 12.5


def test_requests_keep_the_plan_they_arrived_under(world, make):
    world.offer(make.workload(100, 50.0))
    before = world.advance(1.0)
    world.set_plan(make.plan("disaggregated", make.roles(4, 1)).model_copy(update={"version": 2}))
    after = world.advance()
    assert {record.plan_version for record in before} == {1}
    assert {(record.plan_version, record.pattern) for record in after} == {(1, "data_parallel"), (2, "disaggregated")}
    for record in after:
        assert (record.plan_version == 2) == (record.arrived_s > 1.0)
        assert record.plan_version == 1 or record.prefill_engine == "e0"


def test_knobs_of_a_plan_reach_the_engines(world, make):
    world.set_plan(make.plan(chunked_prefill_tokens=256, prefill_decode_interval=3))
    for engine in world.engines:
        load = engine.kernel.load()
        assert (load.chunked_prefill_tokens, load.prefill_decode_interval) == (256, 3)


def test_an_engine_that_is_not_available_finishes_what_it_has_and_gets_nothing(world, make):
    world.offer(make.workload(200, 50.0))
    world.advance(1.0)
    running = world.engines[2].own_inflight
    world.set_available("e2", False)
    records = world.advance()
    assert running > 0
    assert all(record.outcome is Outcome.OK for record in records)
    assert not [record for record in records if record.arrived_s > 1.0 and record.decode_engine == "e2"]


def test_nobody_left_means_failed_requests(world, make):
    for engine in world.engines:
        world.set_available(engine.engine_id, False)
    world.offer(make.workload(3, 5.0))
    assert {record.outcome for record in world.advance()} == {Outcome.FAILED}


def test_later_offers_go_on_in_the_same_sessions(world, make):
    first = make.workload(1, 1.0, prompt_tokens=np.array([256]), session=np.array([5]))
    later = make.workload(1, 1.0, prompt_tokens=np.array([2000]), session=np.array([5]))
    world.set_plan(make.plan(policy="prefix_affinity"))
    world.offer(first)
    world.advance(20.0)
    world.offer(later, at_s=20.0)
    (record,) = world.advance()
    assert record.cached_tokens is not None
    assert record.cached_tokens >= 256


def test_offers_out_of_order_are_refused(world, make):
    world.advance(10.0)
    with pytest.raises(ValueError, match="too late"):
        world.offer(make.workload(1, 1.0))


def test_records_read_as_a_router_wrote_them(world, make):
    world.set_plan(make.plan("disaggregated", make.roles(4, 2)))
    world.offer(make.workload(5, 5.0, prompt_tokens=np.full(5, 1000)))
    records = world.advance()
    for record in records:
        written = record.request_record(1_000_000.0)
        assert written.arrived_at_s == 1_000_000.0 + record.arrived_s
        assert written.ttft_s is not None
        assert written.queue_s is not None
        assert written.prefill_s is not None
        assert written.transfer_s is not None
        assert written.ttft_s == pytest.approx(written.queue_s + written.prefill_s + written.transfer_s)
        assert written.prefix_hashes is not None
        assert len(written.prefix_hashes) == 3  # of seven blocks the first, second and fourth
        assert written.split_end == 999


def test_samples_are_what_engines_would_report(world, make):
    world.set_plan(make.plan("disaggregated", make.roles(4, 2)))
    world.offer(make.workload(50, 20.0))
    records = world.advance()
    samples = world.take_samples()
    assert len(samples.transfers) == len([record for record in records if record.transferred_bytes])
    profile = world.engines[0].profile
    for sample in samples.passes:
        expected_s = profile.pass_s(
            sample.prefill_tokens, sample.prefill_context_tokens, sample.decode_batch, sample.kv_tokens
        )
        assert sample.wall_s == pytest.approx(expected_s)
    assert world.take_samples().passes == []


def test_a_preloaded_root_is_found_in_the_cache_and_by_placement(make):
    world = ReferenceFleet(make.fleet(4), make.plan(policy="prefix_affinity"), make.slos())
    for _ in range(2):  # the second time it is there already
        world.preload("e2", 5, 2000)
    world.offer(make.workload(1, 1.0, prompt=4000, root=np.array([5]), root_tokens=np.array([2000])))
    (record,) = world.advance()
    assert (record.decode_engine, record.cached_tokens) == ("e2", 2000)
    world.check()


def test_what_does_not_fit_cannot_be_preloaded(make):
    world = ReferenceFleet(make.fleet(1, kv_capacity_tokens=1000), make.plan(), make.slos())
    with pytest.raises(ContextTooLong):
        world.preload("e0", 1, 5000)
    world.check()
