"""From timelines to what a plan is worth."""

import math

import numpy as np
import pytest

from engines.types import Role
from tuner.slo import Slo
from tuner.twin.forecast import forecast, good_requests
from tuner.twin.types import Cause, Ending, Timeline


def timeline(**columns):
    """Four requests, all of them served well, unless columns say otherwise."""
    plain = {
        "ending": np.zeros(4, np.int8),
        "ttft_s": np.full(4, 0.1),
        "tpot_s": np.full(4, 0.01),
        "e2e_s": np.full(4, 1.0),
        "queue_s": np.full(4, 0.02),
        "prefill_s": np.full(4, 0.05),
        "transfer_s": np.full(4, 0.03),
        "decode_s": np.full(4, 0.9),
        "cached_tokens": np.zeros(4, np.int64),
        "decode_engine": np.zeros(4, np.int64),
        "split": np.zeros(4, np.bool_),
        "busy_prefill_s": np.array([2.0, 0.0]),
        "busy_decode_s": np.array([0.0, 3.0]),
        "makespan_s": 4.0,
    }
    return Timeline(**(plain | columns))


@pytest.fixture
def of(make):
    """Forecast for four requests in eight seconds, half of them of class `gold`."""

    def make_forecast(found, **classes):
        work = make.workload(
            4,
            1.0,
            arrived_s=np.arange(4.0),
            span_s=8.0,
            classes=("default", "gold"),
            slo_class=np.array([0, 0, 1, 1]),
        )
        slos = make.slos(400, 30, **classes)
        return forecast(work, found, slos, make.fleet(2), make.plan("disaggregated", {"e0": Role.PREFILL}))

    return make_forecast


def test_goodput_is_per_second_of_the_span(of):
    found = of(timeline(ttft_s=np.array([0.1, 0.5, 0.1, 0.1])))
    assert (found.offered_rps, found.goodput_rps) == (4 / 8, 3 / 8)


def test_what_was_not_served_is_not_good(of):
    ending = np.array([Ending.OK, Ending.SHED, Ending.NO_ROOM, Ending.OK], np.int8)
    found = of(timeline(ending=ending))
    assert found.goodput_rps == 2 / 8
    assert found.causes == {Cause.REFUSED: 2}


def test_one_output_token_needs_no_time_per_token(of):
    assert of(timeline(tpot_s=np.full(4, math.nan))).goodput_rps == 4 / 8


def test_classes_have_bounds_weights_and_targets_of_their_own(of):
    gold = Slo(ttft_ms=50, tpot_ms=30, attainment=0.95, weight=3)
    found = of(timeline(ttft_s=np.array([0.1, 0.1, 0.1, 0.04])), gold=gold)
    assert found.classes["default"].attainment == 1.0
    assert found.classes["gold"].attainment == 0.5
    assert found.weighted_goodput == pytest.approx((2 * 1 + 1 * 3) / 8)
    assert found.shortfall == pytest.approx(3 * 2 * (0.95 - 0.5) / (2 * 1 + 2 * 3))


def test_unknown_classes_count_as_the_default(of):
    found = of(timeline())
    assert set(found.classes) == {"default"}
    assert found.classes["default"].requests == 4


def test_a_class_without_requests_has_no_attainment(of):
    found = of(timeline(), silver=Slo(ttft_ms=1, tpot_ms=1))
    assert found.classes["silver"].attainment is None
    assert found.classes["silver"].ttft_s is None
    assert found.shortfall == 0.0


def test_a_late_first_token_is_put_down_to_its_largest_part(of):
    found = of(
        timeline(
            ttft_s=np.full(4, 1.0),
            queue_s=np.array([0.9, 0.1, 0.1, 0.1]),
            prefill_s=np.array([0.05, 0.8, 0.1, 0.1]),
            transfer_s=np.array([0.05, 0.1, 0.8, 0.8]),
            tpot_s=np.full(4, 1.0),
        )
    )
    assert found.causes == {Cause.QUEUE: 1, Cause.PREFILL: 1, Cause.TRANSFER: 2}


def test_slow_tokens_alone_are_put_down_to_decode(of):
    assert of(timeline(tpot_s=np.array([0.01, 0.01, 0.5, 0.01]))).causes == {Cause.DECODE: 1}


def test_utilisation_is_by_role(of):
    assert of(timeline()).utilisation == {"prefill": 0.5, "mixed": 0.75}


def test_good_requests_are_those_that_goodput_counts(of, make):
    work = make.workload(4, 1.0)
    found = timeline(ttft_s=np.array([0.1, 0.5, 0.1, 0.1]), tpot_s=np.array([0.01, 0.01, 0.1, math.nan]))
    assert good_requests(work, found, make.slos()).tolist() == [True, False, False, True]
