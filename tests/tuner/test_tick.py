"""The tuner as its owner uses it, with made-up search results."""

import pytest

from engines.types import Role
from tests.support.traffic import engine_states, traffic
from tuner.candidates import candidate_of, explicit_knobs, split
from tuner.plan import BOOTSTRAP_PLAN, Plan
from tuner.settings import TunerSettings
from tuner.slo import BOOTSTRAP_SLOS
from tuner.tick import Tuner
from tuner.twin.types import Forecast
from tuner.types import Mode, Observation, Prediction, Reason, SearchResult

FLEET = engine_states(4)
SPLIT = split(4, 2, 0.1, explicit_knobs(FLEET))


def observed(now_s=1000.0):
    return Observation(now_s, FLEET, BOOTSTRAP_SLOS, BOOTSTRAP_PLAN, traffic(60), None)


def result():
    def prediction(candidate, goodput, gain):
        return Prediction(
            candidate, Forecast(20, goodput, goodput, 0, {}, {}, {}), goodput, 20, 0.0, goodput, gain, 0.1
        )

    incumbent = prediction(candidate_of(BOOTSTRAP_PLAN, FLEET), 10.0, 0.0)
    return SearchResult([prediction(SPLIT, 18.0, 8.0), incumbent], incumbent, incumbent, 2, 0.1)


def test_a_tick_drafts_a_plan_that_can_be_published():
    tuner, observation = Tuner(TunerSettings()), observed()
    assert tuner.prepare(observation) is not None
    decision = tuner.decide(observation, result(), Mode.AUTO)
    draft = tuner.draft(decision, observation)
    plan = Plan(version=1, issued_at_s=1000, issued_by="tuner", **vars_of(draft))
    assert sorted(plan.roles.values()) == [Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL]
    assert plan.reason.startswith(f"{decision.reason}: ")


def vars_of(draft):
    return {name: getattr(draft, name) for name in ("pattern", "knobs", "roles", "reason")}


def test_there_is_no_draft_of_a_decision_that_changes_nothing():
    tuner, observation = Tuner(TunerSettings()), observed()
    decision = tuner.decide(observation, None, Mode.AUTO)
    with pytest.raises(ValueError, match="changes nothing"):
        tuner.draft(decision, observation)


def test_a_new_leader_goes_on_where_the_old_one_was():
    tuner, observation = Tuner(TunerSettings()), observed()
    tuner.prepare(observation)
    decision = tuner.decide(observation, result(), Mode.AUTO)
    tuner.published(4, decision, observation, 1001.0)
    heir = Tuner.restore(TunerSettings(), tuner.state())
    assert heir.state() == tuner.state()
    later = observed(1005.0)
    assert heir.decide(later, None, Mode.AUTO) == tuner.decide(later, None, Mode.AUTO)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"searches": "many"}', b"\xff"])
def test_a_state_that_cannot_be_read_is_an_error_one_can_catch(raw):
    with pytest.raises(ValueError, match="validation error"):
        Tuner.restore(TunerSettings(), raw)


def test_the_explanation_is_of_the_last_search():
    tuner, observation = Tuner(TunerSettings()), observed()
    assert tuner.explanation() is None
    tuner.prepare(observation)
    tuner.decide(observation, result(), Mode.AUTO)
    tuner.decide(observed(1010.0), None, Mode.AUTO)
    explanation = tuner.explanation()
    assert explanation is not None
    assert explanation.decision.reason is Reason.BETTER_PLAN
    assert explanation.search.trials == 2


def test_measuring_begins_when_the_wake_of_a_change_has_passed():
    tuner = Tuner(TunerSettings(settle_s=15))
    plan = BOOTSTRAP_PLAN.model_copy(update={"issued_at_s": 990.0})
    assert tuner.measured_since_s(plan, 1000.0) == 1005.0
    assert tuner.measured_since_s(plan, 5000.0) > 4000.0
