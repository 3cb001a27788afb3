"""When a search is due, and what it is given."""

from dataclasses import replace

import pytest

from tests.support.traffic import engine_states, traffic
from tuner.candidates import static_baselines
from tuner.plan import BOOTSTRAP_PLAN
from tuner.prepare import prepare, remember
from tuner.settings import TunerSettings
from tuner.slo import BOOTSTRAP_SLOS
from tuner.state import MOST_WINNERS, Promise, TunerState
from tuner.types import Measured, Observation, Reason
from tuner.workload import concatenate

SETTINGS = TunerSettings()
FLEET = engine_states(4)
EPOCH_S = 1e6


def observed(workload, now_s=None, **changes):
    now_s = EPOCH_S + workload.span_s if now_s is None else now_s
    return replace(Observation(now_s, FLEET, BOOTSTRAP_SLOS, BOOTSTRAP_PLAN, workload, None), **changes)


def settled(workload):
    """A state in which the tuner has searched this traffic before and nothing moved for long."""
    state, task = prepare(TunerState(), observed(workload), SETTINGS)
    assert task is not None
    return replace(state, trigger=None, regime_since_s=EPOCH_S - 1000, searches=9)


def test_the_first_search_comes_as_soon_as_there_is_traffic():
    state, task = prepare(TunerState(), observed(traffic(30)), SETTINGS)
    assert task is not None
    assert state.searched_at_s == EPOCH_S + 30


def test_too_few_requests_are_waited_for():
    few = traffic(30).until(0.5)
    assert len(few) < SETTINGS.min_requests
    assert prepare(TunerState(), observed(few), SETTINGS)[1] is None


def test_without_engines_there_is_nothing_to_search():
    assert prepare(TunerState(), observed(traffic(30), engines=[]), SETTINGS)[1] is None


def test_while_nothing_moves_searches_are_rare():
    workload = traffic(100)
    state = settled(workload)
    at_s = EPOCH_S + 100
    assert prepare(state, observed(workload, at_s + SETTINGS.search_every_s - 1), SETTINGS)[1] is None
    assert prepare(state, observed(workload, at_s + SETTINGS.search_every_s), SETTINGS)[1] is not None


def test_a_shift_is_searched_at_once_and_on_its_own_traffic_only():
    before = traffic(100, prompt_tokens=500)
    state = settled(before)
    moved = concatenate([before, traffic(10, prompt_tokens=4000, seed=2)])
    state, task = prepare(state, observed(moved), SETTINGS)
    assert state.trigger is Reason.DRIFT
    assert "prompt_tokens" in state.moved
    assert task is not None
    assert task.workload.span_s < 15
    assert task.workload.prompt_tokens.mean() > 3000


def test_a_lost_engine_and_a_new_slo_are_searched_at_once():
    workload = traffic(100)
    state = settled(workload)
    soon_s = EPOCH_S + 101
    lost, task = prepare(state, observed(workload, soon_s, engines=FLEET[:2]), SETTINGS)
    assert (lost.trigger, task is None) == (Reason.FLEET_CHANGED, False)
    slos = BOOTSTRAP_SLOS.model_copy(update={"version": 7})
    told, task = prepare(state, observed(workload, soon_s, slos=slos), SETTINGS)
    assert (told.trigger, task is None) == (Reason.SLO_CHANGED, False)


def measured(share, requests=100):
    return Measured(30.0, requests, 10.0, 10.0 * share, {}, {}, 1)


def test_goodput_far_below_what_was_predicted_is_a_shift_even_if_the_demand_shows_none():
    workload = traffic(100)
    state = replace(settled(workload), expected_share=0.95)
    state, task = prepare(state, observed(workload, EPOCH_S + 101, measured=measured(0.5)), SETTINGS)
    assert (state.trigger, state.moved) == (Reason.DRIFT, ("goodput",))
    assert task is not None


@pytest.mark.parametrize(
    ("share", "requests", "changes"),
    [
        pytest.param(0.93, 100, {}, id="as good as predicted but for the margin"),
        pytest.param(0.7, 10, {}, id="of too few requests"),
        pytest.param(0.5, 100, {"expected_share": 0.5}, id="predicted so"),
        pytest.param(0.5, 100, {"expected_share": None}, id="nothing was predicted"),
        pytest.param(0.5, 100, {"regime_since_s": EPOCH_S + 60}, id="something moved a moment ago"),
        pytest.param(
            0.5,
            100,
            {"promise": Promise(next(static_baselines(FLEET)), 0.95, 0.95, 10, EPOCH_S, None)},
            id="on probation",
        ),
    ],
)
def test_less_goodput_is_no_shift_when(share, requests, changes):
    workload = traffic(100)
    state = replace(settled(workload), **{"expected_share": 0.95, **changes})
    seen = observed(workload, EPOCH_S + 101, measured=measured(share, requests))
    assert prepare(state, seen, SETTINGS)[0].trigger is None


def test_each_search_draws_its_own_workloads():
    workload = traffic(100)
    state, first = prepare(TunerState(), observed(workload), SETTINGS)
    _, second = prepare(state, observed(workload), SETTINGS)
    assert first is not None
    assert second is not None
    assert first.seed != second.seed


def test_past_winners_for_like_traffic_are_tried_first():
    short, long = list(static_baselines(FLEET))[:2]
    chat, documents = traffic(60, prompt_tokens=300), traffic(60, prompt_tokens=8000)
    state = remember(TunerState(), observed(chat), short)
    state = remember(state, observed(documents), long)
    state = replace(state, regime_since_s=None)
    _, task = prepare(state, observed(traffic(60, prompt_tokens=7000, seed=9)), SETTINGS)
    assert task is not None
    assert task.guesses[0] == long


def test_what_is_remembered_is_bounded():
    state = TunerState()
    for candidate in static_baselines(engine_states(16), most_splits=15):
        state = remember(state, observed(traffic(30)), candidate)
    assert len(state.winners) == MOST_WINNERS
