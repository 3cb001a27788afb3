"""What the twin benchmark makes of its measurements."""

import json
import math

import numpy as np
import pytest

from benchmarks.adapt.scenarios import load_scenario
from benchmarks.twin.fidelity import Comparison, compare, errors, shortened
from benchmarks.twin.plans import PLANS
from benchmarks.twin.run import goals, report
from benchmarks.twin.speed import Speed, independent_requests
from engines.types import Role

NONE = [0.0, 0.0, 0.0]


def comparison(**changes):
    plain = {
        "scenario": "chat",
        "phase": 0,
        "plan": "balanced",
        "requests": 100,
        "attainment": 0.9,
        "goodput_error": 0.01,
        "ttft_errors": [0.0, 0.02, 0.1],
        "tpot_errors": NONE,
        "same": 0.5,
    }
    return Comparison(**(plain | changes))


def speed(simulator, plan, engines, cpu_s):
    return Speed(simulator, plan, engines, requests=1000, cpu_s=cpu_s)


@pytest.fixture
def speeds():
    return [
        speed("twin", "data parallel", 16, 0.004),
        speed("twin", "disaggregated", 16, 0.02),
        speed("twin", "disaggregated", 1024, 1.0),
        speed("reference", "data parallel", 16, 0.5),
    ]


def test_goals_are_judged_by_the_slowest_plan_and_the_worst_error(speeds):
    rate, error = goals(speeds, [comparison(), comparison(goodput_error=0.04)])
    assert (rate.value, rate.met) == (50_000.0, False)
    assert (error.value, error.met) == (0.04, False)


def test_nothing_measured_is_neither_met_nor_missed():
    assert [goal.met for goal in goals([], [])] == [None, None]


def test_a_scenario_shows_the_worst_of_its_phases_and_plans(speeds):
    found = report(speeds, [comparison(), comparison(phase=1, requests=300, goodput_error=0.02, same=1.0)], 0.5, 1, {})
    assert "| chat | 400 | 2.0 % | 0.0 % | 2.0 % | 10.0 % | 0.0 % | 0.0 % | 0.0 % | 87.5 % |" in found.markdown()
    assert "| twin, disaggregated | – | 50,000 | – | 1,000 |" in found.markdown()
    assert len(json.loads(found.json())["results"]) == 6


def test_errors_are_relative_and_by_percentile():
    values = np.arange(1.0, 101.0)
    assert errors(1.1 * values, values) == pytest.approx([0.1, 0.1, 0.1])
    assert errors(np.array([math.nan]), np.array([math.nan])) == NONE
    assert errors(np.array([1.0]), np.array([math.nan])) == [1.0, 1.0, 1.0]


def test_long_traffic_is_cut_to_so_many_requests():
    work = independent_requests(100, 10.0, seed=1)
    cut = shortened(work, 30)
    assert len(cut) == 30
    assert cut.span_s == work.arrived_s[30]
    assert shortened(work, 100) is work


def test_every_plan_fits_every_fleet():
    fleet = load_scenario("fleet-2").fleet
    for make in PLANS.values():
        plan = make(fleet)
        roles = [plan.role_of(engine.engine_id) for engine in fleet]
        assert any(role is not Role.PREFILL for role in roles)


@pytest.mark.timeout(600)  # the twin is compiled if nothing on disk fits its sources
def test_the_twin_is_compared_under_each_plan():
    found = list(compare(load_scenario("summaries"), 40, seed=1))
    assert [each.plan for each in found] == list(PLANS)
    assert max(each.goodput_error for each in found) <= 0.03


def test_the_headline_names_the_slowest_plan_and_the_worst_error(speeds):
    fast, near = report(speeds, [comparison(), comparison(goodput_error=0.04)], 0.5, 1, {}).headline
    assert fast.startswith("50,000 simulated requests/s")
    assert near == "Goodput within 4.0 % of the reference's in 2 comparisons"
