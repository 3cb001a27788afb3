"""The simulator beside real engines: what is compared, and how an error is told."""

from contextlib import aclosing

import msgspec
import numpy as np
import pytest

from benchmarks.fidelity.run import SLOS, TRAFFIC
from benchmarks.fidelity.summary import Columns, Compared, report
from benchmarks.fidelity.telemetry import STAGES, Span, fitted_fleet, told_passes
from controller.store import Keys, open_store
from engines.emulated.profile import load_profile
from engines.records import PassRecord
from engines.telemetry import Heartbeat
from engines.types import EngineLoad
from tests.support.infos import engine_info
from tuner.slo import DEFAULT_CLASS

PROFILE = load_profile("laptop")
INFO = engine_info(kind="new-kind")


@pytest.fixture
def workload():
    return TRAFFIC.over(40.0, np.random.default_rng(3))


def columns(workload, ttft_s, tpot_s=0.1, good=True):
    count = len(workload)
    return Columns(np.ones(count, dtype=bool), np.full(count, ttft_s), np.full(count, tpot_s), np.full(count, good))


def compared(workload, served, simulated, test_from_s=20.0):
    stages = dict.fromkeys(STAGES, 0.1)
    return Compared("data_parallel", workload, test_from_s, served, simulated, stages, stages, [], PROFILE)


def test_only_what_arrived_after_the_fit_is_compared(workload):
    served, simulated = columns(workload, 1.0), columns(workload, 1.0)
    early = workload.arrived_s < 20.0
    simulated.ttft_s[early], simulated.good[early] = 9.0, False
    found = compared(workload, served, simulated)
    assert found.errors("ttft_s")["p99"] == 0
    assert found.goodput_error == 0


def test_an_error_is_relative_to_the_real_engines_and_has_a_sign(workload):
    found = compared(workload, columns(workload, 1.0, 0.2), columns(workload, 1.1, 0.15))
    assert found.errors("ttft_s")["p90"] == pytest.approx(0.1)
    assert found.errors("tpot_s")["mean"] == pytest.approx(-0.25)


def test_a_simulator_that_is_off_misses_its_goals(workload):
    found = compared(workload, columns(workload, 1.0), columns(workload, 1.2, good=False))
    goals = {goal.name: goal for goal in report([found], TRAFFIC, SLOS.classes[DEFAULT_CLASS], 1, {}).goals}
    assert not goals["error of goodput, worst pattern"].met
    assert not goals["error of P90 TTFT, worst pattern"].met
    assert goals["error of mean TPOT, worst pattern"].met


def test_an_error_of_goodput_has_the_range_that_so_few_requests_leave_open(workload):
    served, simulated = columns(workload, 1.0), columns(workload, 1.0)
    assert compared(workload, served, simulated).goodput_error_range == (0.0, 0.0)
    tested = np.flatnonzero(workload.arrived_s >= 20.0)
    simulated.good[tested[0]] = False
    low, high = compared(workload, served, simulated).goodput_error_range
    assert low < -1 / len(tested) < high <= 0


def test_without_a_good_request_the_error_of_goodput_is_not_measured(workload):
    found = compared(workload, columns(workload, 1.0, good=False), columns(workload, 1.0))
    assert found.goodput_error is None
    assert found.goodput_error_range is None


def decode_pass(at_s, wall_s, batch=4):
    return PassRecord(
        engine_id="e0",
        kind="new-kind",
        at_s=at_s,
        wall_s=wall_s,
        prefill_tokens=0,
        prefill_context_tokens=0,
        decode_batch=batch,
        kv_tokens=500 * batch,
        queued=0,
    )


async def test_passes_of_its_span_are_told_beside_what_the_models_make_of_them(redis_url):
    keys = Keys("m")
    inside = [decode_pass(100.0 + at, 0.08 + 0.04 * (at % 2)) for at in range(10)]
    async with aclosing(open_store(redis_url)) as store:
        await store.append(keys.passes, [msgspec.json.encode(each) for each in [*inside, decode_pass(200.0, 9.0)]], 99)
        (found,) = await told_passes(store, "m", Span(100.0, 200.0), PROFILE)
    assert (found.engine_id, found.sort, found.told) == ("e0", "decode", 10)
    assert found.real_s == pytest.approx(0.1)
    assert found.modelled_s == pytest.approx(PROFILE.step_s(4, 2000))


async def test_a_fleet_is_fitted_to_what_was_reported_in_its_span_alone(redis_url):
    keys = Keys("m")
    beat = Heartbeat(info=INFO, load=EngineLoad(kv_capacity_tokens=20_000))
    inside = [decode_pass(100.0 + at, 0.08, batch=1 + at % 8) for at in range(60)]
    outside = [decode_pass(200.0 + at, 0.8, batch=1 + at % 8) for at in range(60)]
    async with aclosing(open_store(redis_url)) as store:
        await store.heartbeat(keys.engine("e0"), msgspec.json.encode(beat), 60)
        await store.append(keys.passes, [msgspec.json.encode(each) for each in inside + outside], 1000)
        (engine,) = await fitted_fleet(store, "m", Span(100.0, 200.0))
    assert engine.engine_id == "e0"
    assert engine.profile.step_s(4, 2000) == pytest.approx(0.08, rel=0.2)
