"""Whatever routers report, the window survives it, stays within bounds and stays usable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.records import ArrivalBatch, Outcome, RequestRecord
from tuner.cleaning import Flaw, clean_arrivals, clean_records
from tuner.observe import Window
from tuner.slo import BOOTSTRAP_SLOS

NOW_S = 1_700_000_000.0
HUGE = 10**400

numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, -1, 1, 0.5, 100, 5000, HUGE, NOW_S, NOW_S - 10, NOW_S + 1e6]),
)
maybe = st.none() | numbers
hashes = st.lists(st.integers(-(2**65), 2**65) | st.integers(0, 2**64 - 1), max_size=14).map(tuple)
names = st.sampled_from(["a", "b", "c", "d", "", "é\n", "x" * 500])

records = st.builds(
    RequestRecord,
    request_id=names,
    router_id=names,
    slo_class=names,
    arrived_at_s=numbers | st.floats(NOW_S - 700, NOW_S + 10),
    outcome=st.sampled_from(Outcome),
    status=st.just(200),
    api=st.just("chat"),
    stream=st.booleans(),
    pattern=names,
    plan_version=numbers,
    prefill_engine=st.none() | names,
    decode_engine=st.none() | names,
    attempts=st.integers(0, 5),
    prompt_tokens=maybe,
    cached_tokens=maybe,
    output_tokens=maybe,
    split_begin=maybe,
    ttft_s=maybe,
    tpot_s=maybe,
    e2e_s=numbers,
    queue_s=maybe,
    prefill_s=maybe,
    transfer_s=maybe,
    decode_s=maybe,
    prefix_hashes=st.none() | hashes,
)


@st.composite
def batches(draw: st.DrawFn) -> ArrivalBatch:
    count = draw(st.integers(0, 4))

    def column(values):
        return tuple(draw(st.lists(values, min_size=count, max_size=count + draw(st.integers(0, 1)))))

    return ArrivalBatch(
        router_id=draw(names),
        request_ids=column(names),
        arrived_at_s=column(numbers | st.floats(NOW_S - 700, NOW_S + 10)),
        prompt_tokens=column(numbers),
        prompt_bytes=column(numbers),
        slo_classes=column(names),
        plan_versions=column(numbers),
        prefix_hashes=column(hashes),
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(batches(), max_size=4), st.lists(records, max_size=8))
def test_no_record_breaks_the_window(arrived: list[ArrivalBatch], ended: list[RequestRecord]):
    window = Window(span_s=600, max_requests=8)
    window.engines_seen({"a": "epoch"}, NOW_S - 100)
    for now_s in (NOW_S, NOW_S + 5, NOW_S + 700):
        window.add_arrivals(arrived, now_s)
        window.add_requests(ended, now_s)
        demand = window.workload(now_s, 600)
        measured = window.measured(now_s, BOOTSTRAP_SLOS, None, now_s - 600)
        assert len(window) <= 8
        assert len(demand) <= len(window)
        assert 0 < demand.span_s <= 600
        assert ((demand.prompt_tokens >= 1) & (demand.prompt_tokens <= 10**9)).all()
        assert ((demand.output_tokens >= 1) & (demand.output_tokens <= 10**8)).all()
        assert ((demand.root_tokens >= 0) & (demand.root_tokens <= demand.prompt_tokens)).all()
        assert measured is None or 0 <= measured.goodput_rps <= measured.offered_rps


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(records, max_size=8))
def test_each_record_is_either_used_or_counted(ended: list[RequestRecord]):
    cleaned = clean_records(ended, NOW_S)
    assert len(cleaned.rows) + cleaned.flaws[Flaw.ABSURD] == len(ended)
    assert len(cleaned.rows) == len(cleaned.request_ids) == len(cleaned.slo_classes) == len(cleaned.router_ids)
    assert np.isfinite(cleaned.rows["arrived_s"]).all()
    assert (cleaned.rows["e2e_s"] >= 0).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(batches(), max_size=4))
def test_each_arrival_is_either_used_or_counted(arrived: list[ArrivalBatch]):
    cleaned = clean_arrivals(arrived, NOW_S)
    assert len(cleaned.rows) + cleaned.flaws[Flaw.ABSURD] == sum(len(batch.request_ids) for batch in arrived)
    assert (cleaned.rows["arrived_s"] <= NOW_S + 1).all()
    assert (cleaned.rows["estimated_tokens"] >= 1).all()


GOOD = {
    "request_id": "r",
    "router_id": "router",
    "slo_class": "default",
    "arrived_at_s": NOW_S - 10,
    "outcome": Outcome.OK,
    "status": 200,
    "api": "chat",
    "stream": True,
    "pattern": "balanced",
    "plan_version": 1,
    "prompt_tokens": 100,
    "cached_tokens": 50,
    "output_tokens": 10,
    "ttft_s": 0.5,
    "tpot_s": 0.05,
    "e2e_s": 1.0,
}

ABSURD = {
    "arrived_at_s": [float("nan"), float("-inf"), -1.0],
    "e2e_s": [float("nan"), -0.1, 1e9, float("inf")],
    "ttft_s": [None, -0.1, 5.0, float("inf"), HUGE],
    "tpot_s": [-0.1, 1e9, float("inf")],
    "prompt_tokens": [0, -5, 10**9, HUGE],
    "output_tokens": [-1, 10**9, HUGE],
    "cached_tokens": [-1, 101, HUGE],
    "queue_s": [-1.0, float("inf"), HUGE],
    "decode_s": [-1.0, 1e9],
    "plan_version": [-1, 2**60],
}


def test_a_good_record_is_used_as_it_is():
    cleaned = clean_records([RequestRecord(**GOOD)], NOW_S)
    assert (len(cleaned.rows), cleaned.rows["ttft_s"][0], cleaned.rows["cached_tokens"][0]) == (1, 0.5, 50)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in ABSURD.items() for value in values],
    ids=lambda given: str(given)[:12],
)
def test_absurd_values_are_refused(name: str, value: float | None):
    cleaned = clean_records([RequestRecord(**(GOOD | {name: value})), RequestRecord(**GOOD)], NOW_S)
    assert (len(cleaned.rows), cleaned.flaws[Flaw.ABSURD]) == (1, 1)


def test_what_a_transfer_brought_was_not_in_the_cache():
    record = RequestRecord(**(GOOD | {"cached_tokens": 90, "split_begin": 20, "split_end": 90}))
    assert clean_records([record], NOW_S).rows["cached_tokens"][0] == 20


def test_hashes_that_cannot_be_are_as_good_as_none():
    fine, wrong = GOOD | {"prefix_hashes": (1, 2**64 - 1)}, GOOD | {"prefix_hashes": (1, -1)}
    cleaned = clean_records([RequestRecord(**fine), RequestRecord(**wrong)], NOW_S)
    assert cleaned.rows["depth"].tolist() == [2, 0]
    assert cleaned.rows["sketch"][0, :2].tolist() == [1, 2**64 - 1]
