"""The first half of a tick: has anything moved, and is a search due? Pure."""

from dataclasses import replace

from tuner.decide import falls_short, unsettled
from tuner.drift import LOOK_BACK_S, Drift, change_point, detect
from tuner.features import features
from tuner.settings import TunerSettings
from tuner.state import MOST_WINNERS, TunerState, Winner, nearest_winners
from tuner.task import SearchTask
from tuner.types import Candidate, Observation, Reason

GUESSES = 4
MOST_BACKLOG_S = 10.0
BACKLOG_FADES_S = 30.0
"""After a shift, how long what piled up before the plan for it is reckoned with."""


def prepare(
    state: TunerState, observation: Observation, settings: TunerSettings
) -> tuple[TunerState, SearchTask | None]:
    """Note what moved; the search to run now, or `None`."""
    state = _notice(state, observation, settings)
    workload = observation.workload.since(_regime_s(state, observation))
    if not observation.usable or len(workload) < settings.min_requests or not _due(state, observation, settings):
        return state, None
    vector = tuple(float(each) for each in features(workload).as_vector(workload.classes))
    task = SearchTask(
        workload=workload,
        engines=observation.usable,
        slos=observation.slos,
        plan=observation.plan,
        guesses=nearest_winners(state.winners, vector, GUESSES),
        backlog_s=_backlog_s(state, observation),
        corrections=state.corrections,
        settings=settings,
        seed=settings.seed + 1000 * state.searches,
        hot=observation.hot,
    )
    return replace(state, searched_at_s=observation.now_s, searches=state.searches + 1), task


def remember(state: TunerState, observation: Observation, winner: Candidate) -> TunerState:
    """Keep the best plan for this kind of traffic, to be tried first when the like comes back."""
    workload = observation.workload.since(_regime_s(state, observation))
    vector = tuple(float(each) for each in features(workload).as_vector(workload.classes))
    kept = [each for each in state.winners if each.candidate != winner][-(MOST_WINNERS - 1) :]
    return replace(state, winners=(*kept, Winner(vector, winner)))


def _notice(state: TunerState, observation: Observation, settings: TunerSettings) -> TunerState:
    """Fleet, SLOs and traffic: what is different from the last tick becomes the trigger."""
    engine_ids = tuple(sorted(engine.engine_id for engine in observation.usable))
    began_s = observation.now_s - observation.workload.span_s
    if state.regime_since_s is None:
        fresh = replace(state, regime_since_s=began_s, trigger=Reason.BETTER_PLAN)
        return replace(fresh, slo_version=observation.slos.version, engine_ids=engine_ids)
    if engine_ids != state.engine_ids:
        state = replace(state, trigger=Reason.FLEET_CHANGED)
    if observation.slos.version != state.slo_version:
        state = replace(state, trigger=Reason.SLO_CHANGED)
    state = replace(state, slo_version=observation.slos.version, engine_ids=engine_ids)
    drift = detect(observation.workload, _regime_s(state, observation)) or _shortfall(state, observation, settings)
    if drift is None:
        return state
    return replace(
        state, trigger=Reason.DRIFT, moved=tuple(drift.moved), regime_since_s=began_s + drift.since_s, rival=None
    )


def _shortfall(state: TunerState, observation: Observation, settings: TunerSettings) -> Drift | None:
    """Clients get much less than was predicted: something moved, whether or not the demand shows it beyond noise.

    A new plan is on probation first, and then held to its promise instead.
    """
    measured, expected_share = observation.measured, state.expected_share
    if measured is None or expected_share is None or state.promise is not None:
        return None
    if unsettled(state, observation.now_s, settings):
        return None
    if not falls_short(measured, expected_share, settings.probation_margin, settings):
        return None
    earliest_s = max(_regime_s(state, observation), observation.workload.span_s - LOOK_BACK_S)
    return Drift(change_point(observation.workload, earliest_s), ["goodput"])


def _regime_s(state: TunerState, observation: Observation) -> float:
    """Where the present regime begins, in the workload's own time."""
    began_s = observation.now_s - observation.workload.span_s
    since_s = began_s if state.regime_since_s is None else state.regime_since_s
    return min(max(0.0, since_s - began_s), observation.workload.span_s - 1e-3)


def _backlog_s(state: TunerState, observation: Observation) -> float:
    """What arrived between a shift and the plan for it has mostly to be served still, whichever plan comes.

    Requests of the same kind at another rate are no strangers to the plan in force, and pile up less.
    """
    if not set(state.moved) - {"rate"} or state.regime_since_s is None:
        return 0.0
    age_s = observation.now_s - state.regime_since_s
    return min(age_s, MOST_BACKLOG_S) if age_s < BACKLOG_FADES_S else 0.0


def _due(state: TunerState, observation: Observation, settings: TunerSettings) -> bool:
    if state.searched_at_s is None or unsettled(state, observation.now_s, settings):
        return True
    return observation.now_s - state.searched_at_s >= settings.search_every_s
