"""What every simulator owes: run on the reference and on the fast twin alike."""

from typing import Any

import numpy as np
import pytest

from tuner.twin.fast import simulate
from tuner.twin.forecast import good_requests
from tuner.twin.reference import simulate_reference
from tuner.twin.types import Ending, Simulator, Timeline

pytestmark = pytest.mark.timeout(600)  # the fast twin is compiled if nothing on disk fits its sources


@pytest.fixture(params=[simulate_reference, simulate], ids=["reference", "fast"])
def simulator(request: pytest.FixtureRequest) -> Simulator:
    found: Simulator = request.param
    return found


def total_s(timeline: Timeline) -> Any:
    return timeline.queue_s + timeline.prefill_s + timeline.transfer_s


def test_an_idle_engine_takes_as_long_as_its_profile_says(simulator, make):
    fleet, work = make.fleet(1), make.workload(1, 1.0, prompt_tokens=np.array([700]), output_tokens=np.array([5]))
    profile = fleet[0].profile
    timeline = simulator(work, fleet, make.plan(), make.slos())
    prefill_s = profile.prefill_s(700, 700 * 700 // 2)
    decode_s = sum(profile.step_s(1, 700 + output) for output in (1, 2, 3, 4))
    assert timeline.ttft_s[0] == pytest.approx(prefill_s)
    assert timeline.tpot_s[0] == pytest.approx(decode_s / 4)
    assert timeline.e2e_s[0] == pytest.approx(prefill_s + decode_s)
    assert timeline.busy_prefill_s[0] == pytest.approx(prefill_s)
    assert timeline.busy_decode_s[0] == pytest.approx(decode_s)
    assert timeline.makespan_s == pytest.approx(work.arrived_s[0] + prefill_s + decode_s)


def test_a_split_request_pays_for_prefill_transfer_and_the_last_token(simulator, make):
    fleet, work = make.fleet(2), make.workload(1, 1.0, prompt_tokens=np.array([1000]), output_tokens=np.array([2]))
    profile = fleet[0].profile
    plan = make.plan("disaggregated", make.roles(2, 1))
    timeline = simulator(work, fleet, plan, make.slos())
    assert bool(timeline.split[0])
    assert int(timeline.decode_engine[0]) == 1
    assert timeline.transfer_s[0] == pytest.approx(profile.transfer_s(999 * profile.kv_layout.bytes_per_token))
    first_s = profile.prefill_s(999, 999 * 999 // 2) + profile.prefill_s(1, (2 * 999 + 1) // 2)
    assert timeline.prefill_s[0] == pytest.approx(first_s)
    assert timeline.ttft_s[0] == pytest.approx(first_s + timeline.transfer_s[0])
    assert timeline.cached_tokens[0] == 999


def test_one_output_token_has_no_time_per_token(simulator, make):
    work = make.workload(3, 5.0, output_tokens=np.array([1, 2, 1]))
    timeline = simulator(work, make.fleet(1), make.plan(), make.slos())
    assert np.isnan(timeline.tpot_s).tolist() == [True, False, True]


def test_a_conversation_finds_its_last_prompt_and_answer_in_the_cache(simulator, make):
    work = make.workload(
        2,
        0.1,
        prompt_tokens=np.array([300, 900]),
        output_tokens=np.array([50, 2]),
        session=np.array([7, 7]),
    )
    timeline = simulator(work, make.fleet(1), make.plan(), make.slos())
    assert timeline.cached_tokens.tolist() == [0, 349]  # the last answer token's KV was never computed


def test_sessions_share_their_root_and_nothing_else(simulator, make):
    work = make.workload(
        3,
        0.1,
        prompt_tokens=np.array([500, 600, 700]),
        root=np.array([3, 3, 4]),
        root_tokens=np.full(3, 400),
    )
    timeline = simulator(work, make.fleet(1), make.plan(), make.slos())
    assert timeline.cached_tokens.tolist() == [0, 400, 0]


def test_what_does_not_fit_the_context_is_refused(simulator, make):
    work = make.workload(2, 1.0, prompt_tokens=np.array([200_000, 100]))
    for plan in (make.plan(), make.plan("disaggregated", make.roles(2, 1))):
        timeline = simulator(work, make.fleet(2), plan, make.slos())
        assert timeline.ending.tolist() == [Ending.NO_ROOM, Ending.OK]
        assert np.isnan(timeline.ttft_s[0])


def test_a_full_fleet_makes_requests_wait_and_then_gives_up(simulator, make):
    plan = make.plan(admission="queue", max_running_per_engine=1)
    work = make.workload(80, 20.0, output=300)
    timeline = simulator(work, make.fleet(1), plan, make.slos())
    gave_up = timeline.ending == Ending.NO_ROOM
    assert 0 < gave_up.sum() < len(work)
    assert timeline.queue_s[gave_up] == pytest.approx(30.0)


def test_shedding_refuses_at_once_what_would_be_late(simulator, make):
    work, slos = make.workload(300, 30.0, prompt=2000, output=5), make.slos(ttft_ms=300)
    shedding, taking_all = (
        simulator(work, make.fleet(1), make.plan(admission=admission), slos) for admission in ("shed", "off")
    )
    shed = shedding.ending == Ending.SHED
    assert shed.any()
    assert shedding.e2e_s[shed].max() == 0.0
    assert good_requests(work, shedding, slos).sum() > good_requests(work, taking_all, slos).sum()


def test_the_parts_add_up_to_the_time_to_the_first_token(simulator, make):
    plan = make.plan("balanced", make.roles(4, 2), offload_ratio=0.3)
    timeline = simulator(make.workload(200, 40.0), make.fleet(4), plan, make.slos())
    assert total_s(timeline) == pytest.approx(timeline.ttft_s)
    assert timeline.ttft_s + timeline.decode_s == pytest.approx(timeline.e2e_s)


def test_the_same_arguments_give_the_same_timeline(simulator, make):
    work, plan = make.conversations(200, 30.0, 20), make.plan("disaggregated", make.roles(4, 2))
    first, second = (simulator(work, make.fleet(4), plan, make.slos()) for _ in range(2))
    for name in ("ttft_s", "tpot_s", "e2e_s", "decode_engine", "ending"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_every_request_ends_once_also_when_room_is_short(simulator, make):
    work = make.workload(200, 9.0, prompt=300, output=700)
    tight = make.fleet(3, "laptop", kv_capacity_tokens=9000)
    for plan in (make.plan(), make.plan("disaggregated", make.roles(3, 1), max_inflight_transfers=2)):
        timeline = simulator(work, tight, plan, make.slos())
        served = timeline.ending == Ending.OK
        assert served.any()
        assert np.isfinite(timeline.ttft_s[served]).all()
        assert np.isnan(timeline.ttft_s[~served]).all()
        assert timeline.makespan_s >= work.arrived_s[-1]


def test_more_engines_do_not_hurt(simulator, make):
    work = make.workload(300, 60.0)
    slow, quick = (simulator(work, make.fleet(count), make.plan(), make.slos()) for count in (4, 8))
    assert np.percentile(quick.ttft_s, 90) <= np.percentile(slow.ttft_s, 90)
    assert np.percentile(quick.tpot_s, 90) <= np.percentile(slow.tpot_s, 90)


def test_round_robin_goes_round(simulator, make):
    timeline = simulator(make.workload(8, 10.0), make.fleet(3), make.plan(policy="round_robin"), make.slos())
    assert timeline.decode_engine.tolist() == [1, 2, 0, 1, 2, 0, 1, 2]


def test_a_pattern_of_ones_own_counts_as_a_split(simulator, make):
    timeline = simulator(make.workload(20, 10.0), make.fleet(2), make.plan("mine", make.roles(2, 1)), make.slos())
    assert timeline.split.all()


def test_a_fleet_without_engines_is_refused(simulator, make):
    with pytest.raises(ValueError, match="engine"):
        simulator(make.workload(1, 1.0), [], make.plan(), make.slos())


def test_no_requests_make_an_empty_timeline(simulator, make):
    nothing = make.workload(1, 1.0).take(slice(0, 0))
    timeline = simulator(nothing, make.fleet(2), make.plan(), make.slos())
    assert len(timeline.ending) == 0
    assert timeline.makespan_s == 0.0
