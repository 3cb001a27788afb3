"""One tick's decision: a pure state machine. The same state, observation and search give the same decision.

A plan is changed only for a gain that is worth it, beyond the noise, not too soon after the last one, and then watched:
if clients do not get what was promised while the load is comparable, it is taken back.
"""

import math
from dataclasses import replace

from tuner.candidates import candidate_of, region
from tuner.settings import TunerSettings
from tuner.state import Barred, Promise, TunerState
from tuner.types import Candidate, Decision, Measured, Mode, Observation, Prediction, Reason, SearchResult

COMPARABLE_LOAD = 0.35
"""Relative difference of offered load up to which a promise can be held against a plan."""

DISASTER = 0.5
"""Relative shortfall that no wake of a change explains."""

PATIENCE = 5
"""Probations after which a plan is let off of which nothing could be measured."""

LEAST_OFFERED = 0.05
"""Share of the offered load that gains are related to at least: a plan that gives nothing makes no gain infinite."""

NO_LOSS = 0.005
"""Share of the offered load below which a loss on one workload is none."""

FIRST_SEARCHES = 3
"""After a cold start the first plans rest on little traffic; better ones need not wait."""

MEASURED_ENOUGH = 200
"""Requests after which one interval's measured error counts in full."""


def decide(
    state: TunerState, observation: Observation, result: SearchResult | None, mode: Mode, settings: TunerSettings
) -> tuple[TunerState, Decision]:
    """The next state and the decision. `result` is `None` when nothing was searched this tick."""
    state = _learn(state, observation, result)
    state, decision = _judge(state, observation, result, settings)
    decision = replace(decision, measured=observation.measured, considered=result, drifted=state.moved)
    decision = _within(mode, decision)
    if result is not None:
        state = replace(state, trigger=None, expected_share=_expected_share(decision, result))
    return state, decision


def _expected_share(decision: Decision, result: SearchResult) -> float | None:
    """Of offered requests that should be good from now on."""
    expected = result.incumbent if decision.chosen is None or decision.promise is None else decision.promise
    return expected.goodput_rps / expected.offered_rps if expected.offered_rps > 0 else None


def _judge(
    state: TunerState, observation: Observation, result: SearchResult | None, settings: TunerSettings
) -> tuple[TunerState, Decision]:
    if not observation.usable:
        return state, Decision(Reason.NO_ENGINES, "no engine is live: nothing to plan for")
    if state.promise is not None:
        state, kept = _watch(state, state.promise, observation, settings)
        if kept is not None:
            return state, kept
    if result is None:
        return state, _idle(state, observation, settings)
    return _choose(state, observation, result, settings)


def _learn(state: TunerState, observation: Observation, result: SearchResult | None) -> TunerState:
    """Compare what was predicted for the plan in force with what clients got from it.

    Searches can follow each other faster than the measured interval moves on: only what is new in it counts.
    """
    measured = observation.measured
    if result is None or measured is None or measured.offered_rps <= 0 or state.trigger is not None:
        return state
    predicted = result.incumbent.forecast
    if predicted.offered_rps <= 0 or measured.requests == 0:
        return state
    corrections = state.corrections.learn(
        region(result.incumbent.candidate),
        predicted.goodput_rps / predicted.offered_rps,
        measured.goodput_rps / measured.offered_rps,
        min(1.0, measured.requests / MEASURED_ENOUGH) * _new_share(state, observation, measured),
    )
    return replace(state, corrections=corrections, learnt_at_s=observation.now_s)


def _new_share(state: TunerState, observation: Observation, measured: Measured) -> float:
    """How much of the measured interval has not been learnt from yet."""
    if state.learnt_at_s is None:
        return 1.0
    return min(1.0, (observation.now_s - state.learnt_at_s) / measured.span_s)


# probation


def _watch(
    state: TunerState, promise: Promise, observation: Observation, settings: TunerSettings
) -> tuple[TunerState, Decision | None]:
    """Hold the plan in force to its promise; a decision only if it broke it.

    What had piled up before the change is still being served at first, so before the end of its probation only a
    disaster counts against a plan.
    """
    if candidate_of(observation.plan, observation.usable) != promise.candidate or state.trigger is not None:
        return replace(state, promise=None), None  # another plan, or other traffic: nothing to compare
    over = observation.now_s - promise.made_at_s >= settings.probation_s
    measured, margin = observation.measured, settings.probation_margin if over else DISASTER
    if measured is not None and _broken(promise, measured, margin, settings):
        return _take_back(state, promise, observation, measured, settings)
    known = measured is not None or observation.now_s - promise.made_at_s >= PATIENCE * settings.probation_s
    return (replace(state, promise=None) if over and known else state), None


def _broken(promise: Promise, measured: Measured, margin: float, settings: TunerSettings) -> bool:
    if abs(measured.offered_rps / promise.offered_rps - 1) > COMPARABLE_LOAD:
        return False
    return falls_short(measured, promise.good_share, margin, settings)


def falls_short(measured: Measured, expected_share: float, margin: float, settings: TunerSettings) -> bool:
    """Whether clients get less of what they ask for than was expected, by more than a margin and the noise."""
    if measured.requests < settings.min_requests or measured.offered_rps <= 0:
        return False
    share = measured.goodput_rps / measured.offered_rps
    noise = math.sqrt(max(share * (1 - share), 0.01) / measured.requests)
    return share < expected_share * (1 - margin) - settings.confidence_z * noise


def _take_back(
    state: TunerState, promise: Promise, observation: Observation, measured: Measured, settings: TunerSettings
) -> tuple[TunerState, Decision]:
    """Bar the plan, and go back to the one before if that is an alternative; else search again at once."""
    barred = Barred(promise.candidate, observation.now_s + settings.barred_s)
    share = measured.goodput_rps / measured.offered_rps
    corrections = state.corrections.learn(region(promise.candidate), promise.predicted_share, share)
    state = replace(
        state,
        promise=None,
        barred=(*state.barred, barred),
        corrections=corrections,
        learnt_at_s=observation.now_s,
    )
    said = f"promised {promise.good_share:.0%} good requests, clients got {share:.0%} of {measured.requests}"
    if promise.previous is None:
        state = replace(state, trigger=Reason.BETTER_PLAN)
        return state, Decision(Reason.PROBATION, f"{said}; looking for another plan, as the traffic moved since")
    return state, Decision(Reason.ROLLED_BACK, f"{said}: back to {describe(promise.previous)}", chosen=promise.previous)


# choosing


def _choose(
    state: TunerState, observation: Observation, result: SearchResult, settings: TunerSettings
) -> tuple[TunerState, Decision]:
    best = _best_allowed(state, observation, result)
    if best is None or best.candidate == result.incumbent.candidate:
        stays = Decision(Reason.STEADY, _steady_sentence(result))
        return replace(state, rival=None), _copies(state, observation, result, settings) or stays
    if not _worth(best, result, settings):
        sentence = f"{describe(best.candidate)} would gain {_gain(best, result)}, which is too little to be sure of"
        stays = Decision(Reason.GAIN_TOO_SMALL, sentence, proposed=None)
        return replace(state, rival=None), _copies(state, observation, result, settings) or stays
    held = _held_back(state, observation, best, settings)
    if held is not None:
        return replace(state, rival=best.candidate), held
    return replace(state, rival=None), _change(state, observation, best, result, settings)


def _best_allowed(state: TunerState, observation: Observation, result: SearchResult) -> Prediction | None:
    barred = {each.candidate for each in state.barred if each.until_s > observation.now_s}
    return next((each for each in result.ranked if each.candidate not in barred), None)


def _worth(best: Prediction, result: SearchResult, settings: TunerSettings) -> bool:
    """Enough on average, and beyond noise or on no workload for the worse.

    Near saturation a better plan may gain nothing on one workload and everything on the next: its standard error is
    large, and still it is never the wrong choice.
    """
    sure = best.gain > settings.confidence_z * best.gain_se or best.least_gain > -NO_LOSS * best.offered_rps
    return sure and _relative(best, result) >= settings.min_gain


def _relative(best: Prediction, result: SearchResult) -> float:
    incumbent = result.incumbent
    base = max(incumbent.goodput_rps, LEAST_OFFERED * incumbent.offered_rps)
    return best.gain / base if base > 0 else 0.0


def _held_back(
    state: TunerState, observation: Observation, best: Prediction, settings: TunerSettings
) -> Decision | None:
    """Hysteresis: a change waits for the dwell and, while nothing moved, for a second search that agrees."""
    dwell_s = _dwell_s(state, observation, settings)
    if dwell_s > _since_change_s(state, observation):
        sentence = f"{describe(best.candidate)} looks better, but the last change is not {dwell_s:g} s old"
        return Decision(Reason.DWELL, sentence)
    agreed = state.rival is not None and region(state.rival) == region(best.candidate)
    if agreed or unsettled(state, observation.now_s, settings):
        return None
    return Decision(Reason.DWELL, f"{describe(best.candidate)} looks better; another search has to agree")


def _dwell_s(state: TunerState, observation: Observation, settings: TunerSettings) -> float:
    """Least time between two changes: none for what has just moved, little while that settles."""
    if state.trigger is not None:
        return 0.0
    return settings.transient_dwell_s if unsettled(state, observation.now_s, settings) else settings.dwell_s


def _since_change_s(state: TunerState, observation: Observation) -> float:
    return observation.now_s - max(state.changed_at_s or 0.0, observation.plan.issued_at_s)


def _copies(
    state: TunerState, observation: Observation, result: SearchResult, settings: TunerSettings
) -> Decision | None:
    """The plan stays as it is, but hot contexts that would pay to be copied are."""
    if not result.replicas or state.promise is not None:  # a plan on probation is not touched
        return None
    contexts = f"{len(result.replicas)} hot context{'s' if len(result.replicas) > 1 else ''}"
    dwell_s = _dwell_s(state, observation, settings)
    if dwell_s > _since_change_s(state, observation):
        return Decision(Reason.DWELL, f"copies of {contexts} would pay, but the last change is not {dwell_s:g} s old")
    sentence = f"{contexts} to be copied to {len(result.replicas[0].engines)} engines; the plan stays otherwise"
    return Decision(Reason.HOT_PREFIX, sentence, chosen=result.incumbent.candidate, replicas=result.replicas)


def unsettled(state: TunerState, now_s: float, settings: TunerSettings) -> bool:
    """Whether all is new or something moved a moment ago: then searches come every tick and changes need not wait."""
    if state.trigger is not None or state.searches <= FIRST_SEARCHES:
        return True
    return state.regime_since_s is not None and now_s - state.regime_since_s < settings.transient_s


def _just_moved(state: TunerState, observation: Observation, settings: TunerSettings) -> bool:
    if not state.moved or state.regime_since_s is None:
        return False
    return observation.now_s - state.regime_since_s < settings.transient_s


def _change(
    state: TunerState, observation: Observation, best: Prediction, result: SearchResult, settings: TunerSettings
) -> Decision:
    reason = state.trigger or (Reason.DRIFT if _just_moved(state, observation, settings) else Reason.BETTER_PLAN)
    if best.candidate == result.best_static.candidate and reason is Reason.BETTER_PLAN:
        reason = Reason.GUARD_STATIC
    why = f" after {', '.join(state.moved)} moved" if reason is Reason.DRIFT else ""
    sentence = (
        f"{describe(best.candidate)}: {best.goodput_rps:.1f} of {best.offered_rps:.1f} requests/s predicted good, "
        f"{_gain(best, result)} on the plan in force{why}"
    )
    return Decision(reason, sentence, chosen=best.candidate, promise=best)


def _idle(state: TunerState, observation: Observation, settings: TunerSettings) -> Decision:
    """Nothing was searched: why."""
    if not len(observation.workload):
        return Decision(Reason.NO_TRAFFIC, "nothing arrives: the plan stays")
    if state.searched_at_s is None or state.trigger is not None:
        need = settings.min_requests
        return Decision(Reason.BOOTSTRAP, f"gathering at least {need} requests of the present traffic first")
    if state.promise is not None:
        return Decision(Reason.PROBATION, "watching whether the last change keeps its promise")
    return Decision(Reason.STEADY, "nothing moved since the last search")


def _within(mode: Mode, decision: Decision) -> Decision:
    """What the mode lets be done of it."""
    if mode is Mode.AUTO:
        return decision
    if mode is Mode.PAUSED:
        return replace(decision, reason=Reason.PAUSED, sentence="paused: nothing is changed", chosen=None)
    if mode is Mode.MANUAL:
        sentence = f"an operator's plan is pinned; otherwise: {decision.sentence}"
        return replace(decision, reason=Reason.PINNED, sentence=sentence, chosen=None, proposed=decision.chosen)
    if decision.chosen is None:
        return decision
    sentence = f"advisory only: {decision.sentence}"
    return replace(decision, reason=Reason.ADVISORY, sentence=sentence, chosen=None, proposed=decision.chosen)


def _steady_sentence(result: SearchResult) -> str:
    incumbent = result.incumbent
    return (
        f"the plan in force is the best of {result.trials} tried: "
        f"{incumbent.goodput_rps:.1f} of {incumbent.offered_rps:.1f} requests/s predicted good"
    )


def _gain(best: Prediction, result: SearchResult) -> str:
    return f"{_relative(best, result):+.1%} (± {best.gain_se:.2f} requests/s)"


def describe(candidate: Candidate) -> str:
    """A candidate in a few words."""
    knobs = candidate.knobs
    ratio = f" {knobs.offload_ratio:g}" if knobs.offload_ratio else ""
    parts = [
        f"{count} {name}"
        for count, name in (
            (candidate.prefill_engines, "prefill"),
            (candidate.decode_engines, "decode"),
            (candidate.mixed_engines, "mixed"),
        )
        if count
    ]
    chunk = f", chunks of {knobs.chunked_prefill_tokens}" if knobs.chunked_prefill_tokens else ""
    return f"{candidate.pattern}{ratio} on {' / '.join(parts)} engines{chunk}"
