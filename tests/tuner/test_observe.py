"""The window: demand by arrival, and what clients got of it."""

import numpy as np
import pytest

from engines.records import ArrivalBatch, Outcome, RequestRecord
from tuner.blame import Cause
from tuner.cleaning import Flaw
from tuner.observe import Window
from tuner.slo import Slo, SloTable

NOW_S = 1_700_000_000.0
SLOS = SloTable(classes={"default": Slo(ttft_ms=1000, tpot_ms=50), "batch": Slo(ttft_ms=60_000, tpot_ms=1000)})


def arrivals(ids, at_s, **given) -> ArrivalBatch:
    """`at_s` are seconds before now."""
    count = len(ids)
    columns = {
        "prompt_tokens": (100,) * count,
        "prompt_bytes": (400,) * count,
        "slo_classes": ("default",) * count,
        "plan_versions": (1,) * count,
        "prefix_hashes": ((),) * count,
    }
    times = tuple(NOW_S - each for each in at_s)
    return ArrivalBatch(router_id="router", request_ids=tuple(ids), arrived_at_s=times, **(columns | given))


def ended(request_id: str, ago_s: float, **given) -> RequestRecord:
    """Arrived `ago_s` seconds before now, and went well."""
    values = {
        "router_id": "router",
        "slo_class": "default",
        "outcome": Outcome.OK,
        "status": 200,
        "api": "chat",
        "stream": True,
        "pattern": "balanced",
        "plan_version": 1,
        "decode_engine": "e1",
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 11,
        "ttft_s": 0.2,
        "tpot_s": 0.02,
        "e2e_s": 0.4,
    }
    return RequestRecord(request_id=request_id, arrived_at_s=NOW_S - ago_s, **(values | given))


def window_of(records, estimates: float = 1.0) -> Window:
    """A window that saw these requests arrive and end; the router estimated prompts `estimates` times too long."""
    window = Window()
    for record in records:
        known = {
            "prompt_tokens": (round(estimates * record.prompt_tokens),),
            "slo_classes": (record.slo_class,),
            "plan_versions": (record.plan_version,),
        }
        window.add_arrivals([arrivals([record.request_id], [NOW_S - record.arrived_at_s], **known)], NOW_S)
    window.add_requests(records, NOW_S)
    return window


def test_an_empty_window_has_no_demand_and_measures_nothing():
    window = Window()
    assert len(window.workload(NOW_S, 60)) == 0
    assert window.measured(NOW_S, SLOS, None, NOW_S - 60) is None


def test_demand_is_in_order_of_arrival_whatever_the_order_of_reports():
    window = Window()
    window.add_arrivals([arrivals(["c", "d"], [10, 5]), arrivals(["a", "b"], [50, 20])], NOW_S)
    window.add_requests([ended("d", 5, prompt_tokens=4), ended("a", 50, prompt_tokens=1)], NOW_S)
    demand = window.workload(NOW_S, 600)
    assert demand.span_s == 50
    assert demand.arrived_s.tolist() == [0, 30, 40, 45]
    assert (demand.prompt_tokens[0], demand.prompt_tokens[3]) == (1, 4)


def test_a_request_counts_as_demand_when_it_arrives_not_when_it_ends():
    """Long answers end last: were demand counted at completion, the window would hardly have any."""
    rng = np.random.default_rng(1)
    at_s, long = np.sort(rng.uniform(0, 100, 2000)), rng.random(2000) < 0.3
    outputs = np.where(long, 2000, 20)
    answer_s = 0.2 + 0.02 * outputs
    window = Window()
    ids = [f"r{row}" for row in range(2000)]
    window.add_arrivals([arrivals(ids, 100 - at_s)], NOW_S)
    done = [
        ended(ids[row], 100 - at_s[row], output_tokens=int(outputs[row]), e2e_s=answer_s[row])
        for row in np.flatnonzero(at_s + answer_s < 100)
    ]
    window.add_requests(done, NOW_S)
    demand = window.workload(NOW_S, 100, np.random.default_rng(2))
    assert len(demand) == 2000
    assert np.mean([record.output_tokens for record in done]) < 0.8 * outputs.mean()  # what completions would say
    assert demand.output_tokens.mean() == pytest.approx(outputs.mean(), rel=0.08)
    lately = demand.output_tokens[demand.arrived_s > demand.span_s - 30]
    assert (lately > 1000).mean() == pytest.approx(0.3, abs=0.06)


def test_answers_of_open_requests_are_those_of_their_class_and_prompt_length():
    records = [ended(f"short{row}", 50, prompt_tokens=100, output_tokens=10) for row in range(50)]
    records += [ended(f"long{row}", 50, prompt_tokens=5000, output_tokens=500) for row in range(50)]
    records += [ended(f"batch{row}", 50, prompt_tokens=100, output_tokens=900, slo_class="batch") for row in range(50)]
    window = window_of(records)
    window.add_arrivals(
        [
            arrivals(
                ["x", "y", "z"], [0.1] * 3, prompt_tokens=(110, 4800, 100), slo_classes=("default", "default", "batch")
            )
        ],
        NOW_S,
    )
    demand = window.workload(NOW_S, 600)
    assert demand.output_tokens[-3:].tolist() == [10, 500, 900]


def test_the_same_window_gives_the_same_demand_without_a_generator():
    records = [ended(f"r{row}", 50, output_tokens=row + 1) for row in range(50)]
    window = window_of(records)
    window.add_arrivals([arrivals(["x", "y"], [1, 1])], NOW_S)
    once, again = window.workload(NOW_S, 600), window.workload(NOW_S, 600)
    assert once.output_tokens.tolist() == again.output_tokens.tolist()


def test_estimates_of_prompt_lengths_are_corrected_by_how_earlier_ones_turned_out():
    window = window_of([ended(f"r{row}", 50, prompt_tokens=150) for row in range(30)], estimates=2 / 3)
    window.add_arrivals([arrivals(["x"], [1], prompt_tokens=(1000,))], NOW_S)
    assert window.workload(NOW_S, 600).prompt_tokens[-1] == 1500


def test_a_router_that_reports_no_arrivals_is_known_by_its_ends():
    window = Window()
    window.add_requests([ended(f"r{row}", row + 1) for row in range(30)], NOW_S)
    assert len(window.workload(NOW_S, 600)) == 30
    assert window.quality[Flaw.MISSING_ARRIVAL] == 0


def test_an_arrival_that_comes_after_the_end_makes_up_for_it():
    window = Window()
    window.add_arrivals([arrivals(["first"], [60])], NOW_S - 60)
    window.add_requests([ended("r", 5)], NOW_S)
    window.add_arrivals([arrivals(["r"], [5])], NOW_S)
    assert len(window.workload(NOW_S, 600)) == 2
    window.add_requests([], NOW_S + 1000)
    assert (window.quality[Flaw.MISSING_ARRIVAL], window.quality[Flaw.DUPLICATE]) == (0, 0)


def test_what_is_missing_is_counted_once_it_can_no_longer_come():
    window = Window(span_s=100)
    window.add_arrivals([arrivals(["never_ends"], [60])], NOW_S - 60)
    window.add_requests([ended("never_arrived", 5)], NOW_S)
    window.add_requests([], NOW_S + 200)
    assert (window.quality[Flaw.MISSING_ARRIVAL], window.quality[Flaw.MISSING_RECORD], len(window)) == (1, 1, 0)


def test_what_is_told_twice_counts_once():
    window = Window()
    for _ in range(2):
        window.add_arrivals([arrivals(["a", "a", "b"], [9, 9, 8])], NOW_S)
        window.add_requests([ended("a", 9), ended("a", 9, output_tokens=5), ended("c", 7)], NOW_S)
    assert len(window.workload(NOW_S, 600)) == 3
    assert window.quality[Flaw.DUPLICATE] == 1 + 1 + 3 + 3
    assert window.workload(NOW_S, 600).output_tokens[0] == 11


def test_what_is_older_than_the_window_is_late():
    window = Window(span_s=100)
    window.add_arrivals([arrivals(["a"], [101])], NOW_S)
    window.add_requests([ended("b", 5000)], NOW_S)
    assert (window.quality[Flaw.LATE], len(window)) == (2, 0)


def test_a_router_whose_clock_is_ahead_still_counts_as_demand():
    window = Window()
    window.add_arrivals([arrivals([f"r{row}" for row in range(3)], [-3600.0, -3600.5, -3601.0])], NOW_S)
    window.add_requests([ended("r0", -3600)], NOW_S)
    window.add_requests([ended("alone", -3600)], NOW_S)
    later = window.workload(NOW_S + 1, 600)
    assert len(later) == 4
    assert window.quality[Flaw.SKEWED] == 5
    assert later.arrived_s.max() <= later.span_s - 1


def test_requests_that_engines_found_wrong_are_no_demand():
    window = window_of([ended("good", 10), ended("bad", 9, outcome=Outcome.REJECTED, status=400, ttft_s=None)])
    assert len(window.workload(NOW_S, 600)) == 1


def test_refused_requests_are_demand_for_as_long_an_answer_as_others():
    refused = {"outcome": Outcome.SHED, "status": 429, "ttft_s": None, "tpot_s": None, "output_tokens": None}
    window = window_of([*(ended(f"r{row}", 20, output_tokens=300) for row in range(30)), ended("x", 10, **refused)])
    assert window.workload(NOW_S, 600).output_tokens.tolist() == [300] * 31


def test_the_window_is_bounded_and_says_from_when_on_it_is_whole():
    window = Window(span_s=600, max_requests=100)
    for batch in range(50):
        ids = [f"{batch}.{row}" for row in range(10)]
        window.add_arrivals([arrivals(ids, [500 - 10 * batch - row for row in range(10)])], NOW_S)
    demand = window.workload(NOW_S, 600)
    assert len(window) == len(demand) == 100
    assert demand.rate_rps == pytest.approx(1, rel=0.05)  # and not 100 requests in 600 s
    assert window.quality[Flaw.CROWDED_OUT] == 400


def test_more_at_once_than_the_window_holds_leaves_the_newest():
    window = Window(span_s=600, max_requests=10)
    window.add_arrivals([arrivals([f"r{row}" for row in range(25)], range(50, 25, -1))], NOW_S)
    demand = window.workload(NOW_S, 600)
    assert (len(demand), window.quality[Flaw.CROWDED_OUT]) == (10, 15)
    assert demand.span_s == pytest.approx(36)


def test_memory_stays_flat_over_a_day():
    window = Window(span_s=600, max_requests=1000)
    for hour in range(24):
        for step in range(20):
            at_s = NOW_S + 3600 * hour + 180 * step
            ids = [f"{hour}.{step}.{row}" for row in range(40)]
            ago = [NOW_S - at_s + 1] * 40
            window.add_arrivals([arrivals(ids, ago, slo_classes=tuple(ids))], at_s)
            window.add_requests([ended(each, ago[0]) for each in ids[:30]], at_s)
    assert len(window) <= 1000
    assert len(window._store._slot_of) == len(window)
    assert len(window.workload(at_s, 600).classes) <= 64


def test_a_class_that_comes_back_has_answers_as_long_as_before():
    """Not as long as those of another class that has gone on meanwhile."""
    window = window_of(
        [
            *many(60, ago_s=580, prefix="long", slo_class="batch", output_tokens=900),
            *many(60, prefix="short", output_tokens=11),
        ]
    )
    ids = [f"new{row}" for row in range(40)]
    window.add_arrivals([arrivals(ids, [2.0] * 40, slo_classes=("batch",) * 40)], NOW_S)
    seen = window.workload(NOW_S, 60)
    batch = seen.slo_class == seen.classes.index("batch")
    assert set(seen.output_tokens[batch]) == {900}


def test_answers_are_remembered_when_their_requests_have_left_the_window():
    window = Window(span_s=60)
    window.add_arrivals([arrivals(["old"], [50.0], slo_classes=("batch",))], NOW_S)
    window.add_requests([ended("old", 50.0, slo_class="batch", output_tokens=700, prompt_tokens=None)], NOW_S)
    later_s = NOW_S + 200
    window.add_arrivals([arrivals(["new"], [-199.0], slo_classes=("batch",))], later_s)
    assert len(window) == 1
    assert window.workload(later_s, 60).output_tokens.tolist() == [700]


def test_answers_of_another_class_say_nothing():
    window = window_of(many(60, output_tokens=900))
    window.add_arrivals([arrivals(["new"], [0.1], slo_classes=("batch",))], NOW_S)
    seen = window.workload(NOW_S, 60)
    assert seen.output_tokens[seen.slo_class == seen.classes.index("batch")].tolist() == [128]


# measured


def many(count: int = 60, ago_s: float = 100.0, step_s: float = 1.0, prefix: str = "r", **given):
    return [ended(f"{prefix}{row}", ago_s - step_s * row, **given) for row in range(count)]


def test_goodput_is_what_met_both_bounds():
    late = many(30, prefix="late", ttft_s=1.5, e2e_s=2.0, queue_s=1.2, prefill_s=0.3)
    slow = many(30, prefix="slow", tpot_s=0.06)
    window = window_of([*many(30), *late, *slow])
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert seen is not None
    assert seen.requests == 90
    assert seen.goodput_rps / seen.offered_rps == pytest.approx(30 / 90)
    assert seen.causes == {Cause.QUEUE: 30, Cause.DECODE: 30}
    assert seen.plan_version == 1


def test_what_is_measured_is_recent_once_that_is_enough():
    """However long a plan has been in force."""
    once_bad = many(290, ago_s=400, tpot_s=0.06)
    window = window_of([*once_bad, *many(100, ago_s=110, prefix="good")])
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 400)
    assert seen is not None
    assert (seen.requests, seen.goodput_rps) == (100, seen.offered_rps)


def test_those_who_give_up_waiting_are_demand_that_was_not_met():
    """Else a plan that is too slow would be judged by the patient alone."""
    nothing = {"ttft_s": None, "tpot_s": None, "output_tokens": None}
    window = window_of([*many(30, prefix="gave_up", outcome=Outcome.GAVE_UP, **nothing), *many(30)])
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert seen is not None
    assert (seen.requests, seen.attainment) == (60, {"default": pytest.approx(0.5)})
    assert seen.causes == {Cause.QUEUE: 30}


def test_refused_and_failed_requests_miss_both_bounds_and_those_that_left_in_time_do_not_count():
    nothing = {"ttft_s": None, "tpot_s": None, "output_tokens": None}
    window = window_of(
        [
            *many(20, prefix="shed", outcome=Outcome.SHED, **nothing),
            *many(20, prefix="failed", outcome=Outcome.FAILED, **nothing),
            *many(20, prefix="left", outcome=Outcome.CLIENT_LEFT, **nothing),
            *many(20, prefix="bad", outcome=Outcome.REJECTED, **nothing),
            *many(20),
        ]
    )
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert seen is not None
    assert (seen.requests, seen.attainment) == (60, {"default": pytest.approx(1 / 3)})
    assert seen.causes == {Cause.REFUSED: 20, Cause.ERROR: 20}


def test_attainment_is_by_class_and_unknown_classes_are_the_default():
    window = window_of(
        [
            *many(30, ttft_s=3.0, e2e_s=4.0),
            *many(30, prefix="b", slo_class="batch"),
            *many(30, prefix="x", slo_class="gone"),
        ]
    )
    seen = window.measured(NOW_S, SLOS, None, NOW_S - 100)
    assert seen is not None
    assert seen.attainment == {"batch": 1, "default": pytest.approx(0.5)}


def test_only_requests_of_the_plan_count():
    window = window_of([*many(40), *many(40, prefix="new", ago_s=80, ttft_s=2.0, e2e_s=3.0, plan_version=2)])
    old, new = (window.measured(NOW_S, SLOS, version, NOW_S - 100) for version in (1, 2))
    both = window.measured(NOW_S, SLOS, None, NOW_S - 100)
    assert old is not None
    assert new is not None
    assert both is not None
    assert (old.attainment, new.attainment) == ({"default": 1}, {"default": 0})
    assert (both.requests, both.plan_version) == (80, None)


def test_a_request_without_an_end_is_missed_once_it_cannot_meet_its_slo_any_more_and_not_before():
    window = window_of(many(60, ago_s=99))
    stuck = [f"stuck{row}" for row in range(20)]
    window.add_arrivals([arrivals(stuck, [90 - row for row in range(20)])], NOW_S)
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert seen is not None
    assert seen.causes == {Cause.QUEUE: 20}
    decoding = window_of(many(60, ago_s=99, output_tokens=3000, tpot_s=0.03, e2e_s=90.2))
    decoding.add_arrivals([arrivals(stuck, [70 - row for row in range(20)])], NOW_S)
    unsettled = decoding.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert unsettled is None or unsettled.causes == {}


def test_what_counts_does_not_depend_on_how_soon_it_ended():
    """Half the requests are shed at once, half answer well but take long: attainment is one half at any moment."""
    window = Window()
    ids = [f"r{row}" for row in range(400)]
    at_s = [200 - row / 2 for row in range(400)]
    window.add_arrivals([arrivals(ids, at_s)], NOW_S)
    shed = {
        "outcome": Outcome.SHED,
        "status": 429,
        "ttft_s": None,
        "tpot_s": None,
        "output_tokens": None,
        "e2e_s": 0.01,
    }
    window.add_requests([ended(ids[row], at_s[row], **shed) for row in range(0, 400, 2)], NOW_S)
    slow = {"output_tokens": 700, "tpot_s": 0.04, "e2e_s": 28.2}
    window.add_requests([ended(ids[row], at_s[row], **slow) for row in range(1, 400, 2) if at_s[row] > 28.2], NOW_S)
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 200)
    assert seen is not None
    assert seen.attainment["default"] == pytest.approx(0.5, abs=0.02)


def test_too_few_requests_measure_nothing():
    assert window_of(many(10)).measured(NOW_S, SLOS, 1, NOW_S - 100) is None


def test_what_a_new_engine_serves_while_it_warms_up_is_demand_but_not_measured():
    window = Window(warm_up_s=10)
    window.engines_seen({"e1": "epoch 1", "e2": "epoch 1"}, NOW_S - 500)
    window.engines_seen({"e1": "epoch 1", "e2": "epoch 2"}, NOW_S - 90)
    cold = [ended(f"cold{row}", 89 - row / 10, decode_engine="e2", ttft_s=9.0, e2e_s=9.5) for row in range(60)]
    window.add_requests([*many(60), *cold], NOW_S)
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert seen is not None
    assert seen.attainment == {"default": 1}
    assert window.quality[Flaw.WARM_UP] == 60
    assert len(window.workload(NOW_S, 600)) == 120


def test_a_record_that_makes_no_sense_leaves_the_request_as_demand_of_unknown_fate():
    window = window_of([*many(60), ended("x", 50, ttft_s=-1.0)])
    seen = window.measured(NOW_S, SLOS, 1, NOW_S - 100)
    assert window.quality[Flaw.ABSURD] == 1
    assert len(window.workload(NOW_S, 600)) == 61
    assert seen is not None
    assert seen.attainment == {"default": 1}


def test_hot_contexts_are_those_of_the_last_moments():
    window = Window()
    for begun, ago_s in ((100, 300.0), (200, 30.0)):
        ids = [f"{begun}-{number}" for number in range(40)]
        hashes = tuple((begun, begun + 1, begun + 2, 1_000 * begun + number) for number in range(40))
        given = {"prefix_hashes": hashes, "prompt_tokens": (1200,) * 40, "prompt_bytes": (4800,) * 40}
        window.add_arrivals([arrivals(ids, [ago_s + number * 0.1 for number in range(40)], **given)], NOW_S)
    (now,) = window.hot_contexts(NOW_S, 120, 4)
    assert (now.prefix, now.blocks, now.requests, now.share) == (f"{202:016x}", 4, 40, 1.0)
    assert {each.prefix for each in window.hot_contexts(NOW_S, 600, 4)} == {f"{102:016x}", f"{202:016x}"}
