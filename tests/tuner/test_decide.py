"""The decision state machine, fed with made-up searches and measurements."""

from dataclasses import replace

import pytest

from tests.support.traffic import engine_states, traffic
from tuner.candidates import candidate_of, data_parallel, explicit_knobs, plan_of, region, split
from tuner.corrections import Corrections
from tuner.decide import PATIENCE, decide
from tuner.plan import HotPrefix
from tuner.settings import TunerSettings
from tuner.slo import BOOTSTRAP_SLOS
from tuner.state import Barred, Promise, TunerState
from tuner.twin.types import Forecast
from tuner.types import Measured, Mode, Observation, Prediction, Reason, SearchResult

FLEET = engine_states(4)
KNOBS = explicit_knobs(FLEET)
PLAIN = data_parallel(4, KNOBS)
SPLIT = split(4, 2, 0.1, KNOBS)
OTHER = split(4, 1, 0.0, KNOBS)
SETTINGS = TunerSettings()
NOW_S = 10_000.0
OFFERED = 20.0

SETTLED = TunerState(regime_since_s=0.0, searched_at_s=NOW_S - 30, slo_version=0, rival=SPLIT, searches=9)
"""Nothing moved for long, and a search before agreed that SPLIT is better."""


def prediction(candidate, goodput, se=0.1, over=None):
    forecast = Forecast(OFFERED, goodput, goodput, 0.0, {}, {}, {})
    gain = goodput - (goodput if over is None else over)
    return Prediction(candidate, forecast, goodput, OFFERED, 0.0, goodput, gain, se)


def searched(*ranked, incumbent=PLAIN):
    """A search that ranked (candidate, goodput) pairs, the plan in force among them."""
    goodputs = dict(ranked)
    predictions = [prediction(each, goodput, over=goodputs[incumbent]) for each, goodput in ranked]
    predictions.sort(key=lambda each: -each.score)
    by_candidate = {each.candidate: each for each in predictions}
    return SearchResult(predictions, by_candidate[incumbent], by_candidate.get(PLAIN, predictions[0]), 10, 0.5)


def observed(plan=PLAIN, measured=None, issued_at_s=0.0, workload=None):
    in_force = plan_of(plan, FLEET).model_copy(update={"version": 3, "issued_at_s": issued_at_s})
    demand = traffic(60) if workload is None else workload
    return Observation(NOW_S, FLEET, BOOTSTRAP_SLOS, in_force, demand, measured)


def measured(goodput, requests=600, offered=OFFERED):
    return Measured(requests / offered, requests, offered, goodput, {"default": goodput / offered})


def test_a_plan_that_gains_enough_and_twice_is_published():
    state, decision = decide(SETTLED, observed(), searched((PLAIN, 10.0), (SPLIT, 15.0)), Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.BETTER_PLAN, SPLIT)
    assert "15.0 of 20.0" in decision.sentence
    assert state.trigger is None


def test_while_nothing_moves_one_search_is_not_enough():
    fresh = replace(SETTLED, rival=None)
    state, decision = decide(fresh, observed(), searched((PLAIN, 10.0), (SPLIT, 15.0)), Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen, state.rival) == (Reason.DWELL, None, SPLIT)


@pytest.mark.parametrize("trigger", [Reason.DRIFT, Reason.FLEET_CHANGED, Reason.SLO_CHANGED])
def test_when_something_moved_one_search_is_enough_and_the_reason_says_what(trigger):
    state = replace(SETTLED, rival=None, trigger=trigger, changed_at_s=NOW_S - 1)
    after, decision = decide(state, observed(), searched((PLAIN, 10.0), (SPLIT, 15.0)), Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (trigger, SPLIT)
    assert after.trigger is None


def test_a_recent_change_is_given_its_time():
    state = replace(SETTLED, changed_at_s=NOW_S - 1)
    _, decision = decide(state, observed(), searched((PLAIN, 10.0), (SPLIT, 15.0)), Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.DWELL, None)


def test_an_operators_recent_plan_is_given_its_time_too():
    observation = observed(issued_at_s=NOW_S - 1)
    _, decision = decide(SETTLED, observation, searched((PLAIN, 10.0), (SPLIT, 15.0)), Mode.AUTO, SETTINGS)
    assert decision.reason is Reason.DWELL


@pytest.mark.parametrize(("goodput", "se"), [(10.1, 0.001), (15.0, 3.0)])
def test_a_gain_that_is_small_or_drowned_in_noise_changes_nothing(goodput, se):
    result = searched((PLAIN, 10.0), (SPLIT, goodput))
    result = replace(result, ranked=[replace(each, gain_se=se, least_gain=-1.0) for each in result.ranked])
    _, decision = decide(SETTLED, observed(), result, Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.GAIN_TOO_SMALL, None)


def test_a_gain_that_varies_widely_but_never_is_a_loss_is_worth_it():
    result = searched((PLAIN, 10.0), (SPLIT, 15.0))
    result = replace(result, ranked=[replace(each, gain_se=5.0, least_gain=0.0) for each in result.ranked])
    _, decision = decide(SETTLED, observed(), result, Mode.AUTO, SETTINGS)
    assert decision.chosen == SPLIT


def test_the_best_plan_stays_without_ado():
    _, decision = decide(SETTLED, observed(), searched((PLAIN, 15.0), (SPLIT, 10.0)), Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.STEADY, None)


def test_falling_back_to_a_static_baseline_is_named_so():
    state = replace(SETTLED, rival=PLAIN)
    result = searched((PLAIN, 15.0), (SPLIT, 10.0), incumbent=SPLIT)
    _, decision = decide(state, observed(SPLIT), result, Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.GUARD_STATIC, PLAIN)


def promise(previous=PLAIN, share=0.9, made_at_s=NOW_S - 70):
    return Promise(SPLIT, share, share, OFFERED, made_at_s, previous)


def test_a_broken_promise_at_comparable_load_is_rolled_back_and_the_plan_barred():
    state = replace(SETTLED, promise=promise())
    after, decision = decide(state, observed(SPLIT, measured(10.0)), None, Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.ROLLED_BACK, PLAIN)
    assert [each.candidate for each in after.barred] == [SPLIT]
    assert after.promise is None


@pytest.mark.parametrize(
    "seen",
    [
        measured(17.0),  # within the margin
        measured(3.0, requests=10),  # too few to tell
        measured(12.0, offered=30.0),  # another load
        measured(11.0),  # the wake of the change
        None,
    ],
)
def test_a_promise_is_not_held_against_a_plan_without_good_evidence(seen):
    state = replace(SETTLED, promise=promise(made_at_s=NOW_S - 30))
    after, decision = decide(state, observed(SPLIT, seen), None, Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen) == (Reason.PROBATION, None)
    assert after.promise is not None


def test_a_disaster_is_not_watched_until_probation_ends():
    state = replace(SETTLED, promise=promise(made_at_s=NOW_S - 30))
    _, decision = decide(state, observed(SPLIT, measured(4.0)), None, Mode.AUTO, SETTINGS)
    assert decision.reason is Reason.ROLLED_BACK


def test_after_drift_there_is_nothing_to_go_back_to_so_it_searches_again():
    state = replace(SETTLED, promise=promise(previous=None))
    after, decision = decide(state, observed(SPLIT, measured(5.0)), None, Mode.AUTO, SETTINGS)
    assert (decision.chosen, after.trigger) == (None, Reason.BETTER_PLAN)
    assert [each.candidate for each in after.barred] == [SPLIT]


def test_probation_ends():
    state = replace(SETTLED, promise=promise(made_at_s=NOW_S - SETTINGS.probation_s))
    after, _ = decide(state, observed(SPLIT, measured(18.0)), None, Mode.AUTO, SETTINGS)
    assert after.promise is None


def test_a_promise_waits_until_something_could_be_measured_but_not_for_ever():
    """Long answers take longer than a probation."""
    for probations, kept in ((1.5, True), (PATIENCE, False)):
        state = replace(SETTLED, promise=promise(made_at_s=NOW_S - probations * SETTINGS.probation_s))
        after, _ = decide(state, observed(SPLIT, None), None, Mode.AUTO, SETTINGS)
        assert (after.promise is not None) is kept


def test_a_promise_dies_with_its_plan_or_its_traffic():
    for state, plan in (
        (replace(SETTLED, promise=promise()), OTHER),
        (replace(SETTLED, promise=promise(), trigger=Reason.DRIFT), SPLIT),
    ):
        after, decision = decide(state, observed(plan, measured(5.0)), None, Mode.AUTO, SETTINGS)
        assert after.promise is None
        assert decision.reason is not Reason.ROLLED_BACK


def test_a_barred_plan_is_passed_over_until_its_time_is_up():
    result = searched((PLAIN, 10.0), (SPLIT, 15.0), (OTHER, 14.0))
    for until_s, expected in ((NOW_S + 1, OTHER), (NOW_S - 1, SPLIT)):
        state = replace(SETTLED, trigger=Reason.DRIFT, barred=(Barred(SPLIT, until_s),))
        _, decision = decide(state, observed(), result, Mode.AUTO, SETTINGS)
        assert decision.chosen == expected


def test_what_clients_got_corrects_the_next_prediction():
    result = searched((PLAIN, 18.0), (SPLIT, 15.0))
    state, seen = SETTLED, measured(9.0)
    for number in range(20):
        later = replace(observed(measured=seen), now_s=NOW_S + number * seen.span_s)
        state, _ = decide(state, later, result, Mode.AUTO, SETTINGS)
    assert state.corrections.factor("data_parallel/0/0") < 0.65


def test_what_was_measured_once_teaches_once_however_often_plans_are_searched():
    result = searched((PLAIN, 18.0), (SPLIT, 15.0))
    once, _ = decide(SETTLED, observed(measured=measured(9.0)), result, Mode.AUTO, SETTINGS)
    again = once
    for _ in range(20):
        again, _ = decide(again, observed(measured=measured(9.0)), result, Mode.AUTO, SETTINGS)
    assert again.corrections.factor("data_parallel/0/0") == once.corrections.factor("data_parallel/0/0")


def test_a_broken_promise_teaches_by_what_was_predicted_before_it_was_corrected():
    held = replace(promise(share=0.6), predicted_share=0.9)
    after, _ = decide(
        replace(SETTLED, promise=held), observed(SPLIT, measured(0.4 * OFFERED)), None, Mode.AUTO, SETTINGS
    )
    assert after.corrections == Corrections().learn(region(SPLIT), 0.9, 0.4)


def test_the_moment_traffic_moves_teaches_nothing():
    state = replace(SETTLED, trigger=Reason.DRIFT)
    after, _ = decide(
        state, observed(measured=measured(2.0)), searched((PLAIN, 18.0), (SPLIT, 15.0)), Mode.AUTO, SETTINGS
    )
    assert after.corrections == Corrections()


@pytest.mark.parametrize(
    ("mode", "reason"), [(Mode.ADVISORY, Reason.ADVISORY), (Mode.MANUAL, Reason.PINNED), (Mode.PAUSED, Reason.PAUSED)]
)
def test_other_modes_publish_nothing(mode, reason):
    _, decision = decide(SETTLED, observed(), searched((PLAIN, 10.0), (SPLIT, 15.0)), mode, SETTINGS)
    assert (decision.reason, decision.chosen) == (reason, None)


def test_an_advisory_says_what_it_would_do():
    _, decision = decide(SETTLED, observed(), searched((PLAIN, 10.0), (SPLIT, 15.0)), Mode.ADVISORY, SETTINGS)
    assert decision.proposed == SPLIT
    assert "balanced 0.1" in decision.sentence


def test_without_engines_or_traffic_the_plan_stays():
    nobody = replace(observed(), engines=[])
    assert decide(SETTLED, nobody, None, Mode.AUTO, SETTINGS)[1].reason is Reason.NO_ENGINES
    silence = observed(workload=traffic(60).take(slice(0, 0)))
    assert decide(SETTLED, silence, None, Mode.AUTO, SETTINGS)[1].reason is Reason.NO_TRAFFIC


def test_before_the_first_search_it_is_gathering():
    _, decision = decide(TunerState(), observed(), None, Mode.AUTO, SETTINGS)
    assert decision.reason is Reason.BOOTSTRAP


def test_the_incumbent_is_recognised_whatever_engines_carry_its_roles():
    plan = plan_of(SPLIT, FLEET)
    assert candidate_of(plan, list(reversed(FLEET))) == SPLIT


HOT = HotPrefix(prefix=f"{7:016x}", blocks=16, engines=("e0", "e1", "e2", "e3"))


@pytest.mark.parametrize("other", [10.0, 15.05])
def test_hot_contexts_that_pay_are_copied_under_the_plan_that_stays(other):
    result = replace(searched((PLAIN, 15.0), (SPLIT, other)), replicas=(HOT,))
    _, decision = decide(SETTLED, observed(), result, Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.chosen, decision.replicas) == (Reason.HOT_PREFIX, PLAIN, (HOT,))
    assert decision.promise is None


def test_a_better_plan_comes_before_copies():
    result = replace(searched((PLAIN, 10.0), (SPLIT, 15.0)), replicas=(HOT,))
    _, decision = decide(SETTLED, observed(), result, Mode.AUTO, SETTINGS)
    assert (decision.reason, decision.replicas) == (Reason.BETTER_PLAN, ())


def test_copies_wait_for_the_dwell_and_for_the_end_of_a_probation():
    result = replace(searched((PLAIN, 15.0), (SPLIT, 10.0)), replicas=(HOT,))
    recent = replace(SETTLED, changed_at_s=NOW_S - 1)
    assert decide(recent, observed(), result, Mode.AUTO, SETTINGS)[1].reason is Reason.DWELL
    watched = replace(SETTLED, promise=replace(promise(made_at_s=NOW_S - 30), candidate=PLAIN))
    assert decide(watched, observed(), result, Mode.AUTO, SETTINGS)[1].reason is Reason.STEADY


def test_when_something_moved_copies_need_not_wait():
    result = replace(searched((PLAIN, 15.0), (SPLIT, 10.0)), replicas=(HOT,))
    state = replace(SETTLED, trigger=Reason.DRIFT, changed_at_s=NOW_S - 1)
    assert decide(state, observed(), result, Mode.AUTO, SETTINGS)[1].reason is Reason.HOT_PREFIX


@pytest.mark.parametrize(("mode", "reason"), [(Mode.ADVISORY, Reason.ADVISORY), (Mode.MANUAL, Reason.PINNED)])
def test_other_modes_only_propose_copies(mode, reason):
    result = replace(searched((PLAIN, 15.0), (SPLIT, 10.0)), replicas=(HOT,))
    _, decision = decide(SETTLED, observed(), result, mode, SETTINGS)
    assert (decision.reason, decision.chosen, decision.proposed) == (reason, None, PLAIN)
