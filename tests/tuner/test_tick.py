"""The tuner as its owner uses it, with made-up search results."""

from dataclasses import replace

import pytest

from engines.types import Role
from tests.support.traffic import engine_states, traffic
from tuner.candidates import candidate_of, explicit_knobs, split
from tuner.plan import BOOTSTRAP_PLAN, HotPrefix, Plan
from tuner.settings import TunerSettings
from tuner.slo import BOOTSTRAP_SLOS
from tuner.tick import Tuner
from tuner.twin.types import Forecast
from tuner.types import Decision, HotContext, Mode, Observation, Prediction, Reason, SearchResult

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


def test_a_draft_keeps_the_copies_of_what_is_hot_still_and_adds_new_ones():
    hot = HotContext(prefix=f"{1:016x}", blocks=16, requests=60, share=0.6, tokens=2048)
    old, cold, new = (HotPrefix(prefix=f"{salt:016x}", blocks=16, engines=("e0", "e1")) for salt in (1, 2, 3))
    plan = BOOTSTRAP_PLAN.model_copy(update={"replicas": (old, cold)})
    observation = replace(observed(), plan=plan, hot=[hot])
    decision = Decision(Reason.BETTER_PLAN, "a test", chosen=SPLIT, replicas=(new,))
    draft = Tuner.draft(decision, observation)
    decoding = tuple(engine_id for engine_id, role in sorted(draft.roles.items()) if role is Role.DECODE)
    assert [(each.prefix, each.engines) for each in draft.replicas] == [(old.prefix, decoding), (new.prefix, decoding)]


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
    assert tuner.measured_since_s(plan) == 1005.0


@pytest.mark.parametrize(("issued_at_s", "proven"), [(0.0, True), (990.0, False)])
def test_only_a_plan_that_has_served_this_traffic_for_a_while_is_gone_back_to(issued_at_s, proven):
    tuner = Tuner(TunerSettings())
    plan = BOOTSTRAP_PLAN.model_copy(update={"issued_at_s": issued_at_s})
    observation = Observation(1000.0, FLEET, BOOTSTRAP_SLOS, plan, traffic(120), None)
    tuner.prepare(observation)
    decision = tuner.decide(observation, result(), Mode.AUTO)
    tuner.published(1, decision, observation, 1001.0)
    assert (b'"previous":null' not in tuner.state()) is proven
