"""How a policy's outcome is read: when it is back near the oracle, and what the goals say."""

import json
import math

import numpy as np
import pytest

from benchmarks.adapt.outcome import LOOK_S, TICK_S, Change, Outcome, reached_s, series
from benchmarks.adapt.scenarios import load_scenario
from benchmarks.adapt.summary import Compared, goals, report

ARRIVED_S = np.arange(0, 180, 0.5)
ALL = np.ones(len(ARRIVED_S), dtype=bool)
NONE = np.zeros(len(ARRIVED_S), dtype=bool)


def from_s(at_s):
    return at_s <= ARRIVED_S


def test_a_policy_that_is_as_good_as_the_oracle_is_there_at_once():
    assert reached_s(ALL, ALL, ARRIVED_S, 60, 120) == 0


def test_time_to_be_near_the_oracle_counts_whole_ticks_from_the_shift():
    # Nine tenths of what arrives within the look after second 90 arrive after its first tenth.
    assert reached_s(from_s(90 + 0.1 * LOOK_S), ALL, ARRIVED_S, 60, 180) == 30
    assert reached_s(from_s(91 + 0.1 * LOOK_S), ALL, ARRIVED_S, 60, 180) == 30 + TICK_S


def test_a_policy_that_stays_bad_never_gets_there():
    assert math.isinf(reached_s(NONE, ALL, ARRIVED_S, 60, 120))


def test_what_happens_after_the_phase_does_not_count():
    assert math.isinf(reached_s(from_s(120), ALL, ARRIVED_S, 60, 120))


def test_near_is_relative_to_what_the_oracle_itself_gets():
    half = np.arange(len(ARRIVED_S)) % 2 == 0
    assert reached_s(half, half, ARRIVED_S, 0, 180) == 0


def test_goodput_over_time_counts_good_requests_by_arrival():
    assert series(from_s(90), ARRIVED_S, 180, step_s=60).tolist() == pytest.approx([0, 1, 2])


def changes(count):
    return [Change(10.0 * at, "better_plan", "some plan", "why") for at in range(count)]


def compared(name, trimtab, count=1, static=ALL, oracle=ALL):
    scenario = load_scenario(name).shortened(90, 2)
    arrived_s = np.linspace(0, scenario.span_s, len(ARRIVED_S), endpoint=False)
    outcomes = {
        "best_static": Outcome("best_static", "p", static),
        "oracle": Outcome("oracle", "p; q", oracle),
        "trimtab": Outcome("trimtab", "p", trimtab, changes(count)),
    }
    return Compared(scenario, arrived_s, outcomes)


def shares(share):
    """Good requests spread evenly, that share of them all."""
    return np.floor(np.arange(1, len(ARRIVED_S) + 1) * share) > np.floor(np.arange(len(ARRIVED_S)) * share)


def test_goals_are_about_the_kind_of_scenario_they_name():
    shifting = compared("shift-day", shares(0.9), count=4, static=shares(0.5))
    stationary = compared("summaries", shares(0.97), count=3)
    of_oracle, of_static, at_rest, ticks, needless = goals([shifting, stationary])
    assert of_oracle.value == pytest.approx(0.9, abs=0.01)
    assert of_oracle.met is False
    assert of_static.value == pytest.approx(1.8, abs=0.02)
    assert of_static.met is True
    assert at_rest.value == pytest.approx(0.97, abs=0.01)
    assert at_rest.met is False
    assert ticks.value == 0
    assert needless.value == pytest.approx(2 / (90 / 3600))


def test_goals_without_their_scenarios_are_not_measured():
    assert [goal.value for goal in goals([compared("summaries", ALL)])[:2]] == [None, None]
    assert [goal.value for goal in goals([compared("shift-day", ALL)])[2:]] == [None, 0, None]


def test_the_mean_over_scenarios_is_taken_of_ratios():
    one, other = compared("shift-day", shares(1.0)), compared("shift-day", shares(0.5))
    assert goals([one, other])[0].value == pytest.approx(0.75, abs=0.01)


def test_a_scenario_without_oracle_still_has_a_row():
    full = compared("summaries", ALL)
    alone = Compared(full.scenario, full.arrived_s, {"trimtab": full.outcomes["trimtab"]})
    made = report([alone], 1, {"cores": "2"})
    assert "| summaries |" in made.markdown()
    assert json.loads(made.json())["results"][0]["of_oracle"] is None


def test_json_tells_every_change_and_phases_never_reached_are_null():
    made = json.loads(report([compared("shift-day", from_s(90), count=2)], 1, {}).json())
    row = next(each for each in made["results"] if each["policy"] == "trimtab")
    assert [change["at_s"] for change in row["changes"]] == [0, 10]
    assert row["reached_s"] == [None, 0]
    assert len(row["goodput_by_minute_rps"]) == 3


def test_the_headline_keeps_traffic_that_moves_apart():
    moving, still = report(
        [compared("shift-day", shares(0.9), static=shares(0.5)), compared("summaries", ALL)], 1, {}
    ).headline
    assert "Traffic that moves (1 scenarios): × 1.80" in moving
    assert "Traffic that does not (1 scenarios): × 1.00" in still
