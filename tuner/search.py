"""The search: which plan would have served the recent traffic best. Optuna proposes, the twin answers.

Two stages. Many candidates are run on one short workload; the best few, the plan in force and the best static baseline
are then compared on several bootstrapped workloads, the same for all, so that the noise of the traffic cancels out of
their differences and the luck of the first stage does not count.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import optuna

from tuner.candidates import candidate_of, plan_of, region, static_baselines
from tuner.corrections import Corrections
from tuner.plan import Plan
from tuner.scoring import Scored, scored
from tuner.settings import TunerSettings
from tuner.slo import SloTable
from tuner.space import Space
from tuner.twin.fast import simulate
from tuner.twin.forecast import forecast
from tuner.twin.types import Fleet, Forecast, Simulator, TwinEngine
from tuner.types import Candidate, EngineState, Prediction, SearchResult
from tuner.workload import Workload

Clock = Callable[[], float]

WARM_UP_SHARE = 0.2
"""Simulations begin with an idle fleet; the first arrivals see too little queueing and are not counted."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, slots=True)
class SearchTask:
    """All that a search needs; it can be sent to another process."""

    workload: Workload
    engines: Sequence[EngineState]
    slos: SloTable
    plan: Plan
    """In force now."""
    guesses: Sequence[Candidate] = ()
    """Past winners for like traffic, tried first."""
    corrections: Corrections = field(default_factory=Corrections)
    settings: TunerSettings = field(default_factory=TunerSettings)
    seed: int = 1


def search(task: SearchTask, clock: Clock, run: Simulator = simulate) -> SearchResult:
    """The best plans for the task's workload. `clock` is only read for the time budget. `ValueError`: no engines."""
    began_s = clock()
    course = Course.of(task, run)
    tried = _explore(task, course, lambda: clock() - began_s < task.settings.budget_s * course.explore_share)
    ranked = _final(task, course, tried)
    return replace(ranked, trials=len(tried), seconds=clock() - began_s)


def what_if(
    workload: Workload,
    engines: Sequence[EngineState],
    slos: SloTable,
    plans: Sequence[Plan],
    settings: TunerSettings | None = None,
    run: Simulator = simulate,
) -> list[Forecast]:
    """What each plan would have made of the workload: a simple prediction, uncorrected."""
    settings = settings or TunerSettings()
    course = Course(_fleet(engines), slos, _sample(workload, settings, 1.0, settings.seed, 1), run)
    return [course.forecast(plan, 0) for plan in plans]


@dataclass(frozen=True, slots=True)
class Course:
    """The workloads that candidates run; the first is the short one of the first stage."""

    fleet: Fleet
    slos: SloTable
    workloads: Sequence[Workload]
    run: Simulator
    explore_share: float = 0.7

    @classmethod
    def of(cls, task: SearchTask, run: Simulator) -> "Course":
        settings = task.settings
        short = _sample(task.workload, settings, 0.5, task.seed, 1)
        longer = _sample(task.workload, settings, 1.0, task.seed + 1, settings.replicas)
        return cls(_fleet(task.engines), task.slos, [*short, *longer], run)

    def forecast(self, plan: Plan, index: int) -> Forecast:
        workload = self.workloads[index]
        timeline = self.run(workload, self.fleet, plan, self.slos)
        warm_s = WARM_UP_SHARE * workload.span_s
        counted = timeline.take(workload.arrived_s >= warm_s)
        return forecast(workload.since(warm_s), counted, self.slos, self.fleet, plan)


def _fleet(engines: Sequence[EngineState]) -> list[TwinEngine]:
    usable = [TwinEngine(engine.engine_id, engine.profile) for engine in engines if not engine.draining]
    if not usable:
        raise ValueError("no engine to plan for")
    return usable


def _sample(workload: Workload, settings: TunerSettings, size: float, seed: int, count: int) -> list[Workload]:
    rng = np.random.default_rng(seed)
    most_s = settings.max_simulated_requests / max(workload.rate_rps, 1e-9)
    span_s = size * min(settings.horizon_s, most_s)
    return [workload.bootstrap(rng, span_s) for _ in range(count)]


def _explore(task: SearchTask, course: Course, in_time: Callable[[], bool]) -> dict[Candidate, float]:
    """Score candidates on the short workload: first the guesses and baselines, then what Optuna proposes."""
    space = Space(task.engines)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=task.seed))
    for guess in _first(task):
        study.enqueue_trial(space.parameters(guess), skip_if_exists=True)
    rng = np.random.default_rng(task.seed)
    scores: dict[Candidate, float] = {}
    best: Candidate | None = None
    for number in range(task.settings.trials):
        if not in_time():
            break
        if best is not None and number % 2:
            study.enqueue_trial(space.neighbour(best, rng), skip_if_exists=True)
        trial = study.ask()
        candidate = space.candidate(trial)
        if candidate not in scores:
            scores[candidate], shortfall = _try(task, course, candidate)
            trial.set_constraint("attainment", shortfall)
        study.tell(trial, scores[candidate])
        best = max(scores, key=scores.__getitem__)
    return scores


def _first(task: SearchTask) -> Iterator[Candidate]:
    yield candidate_of(task.plan, task.engines)
    yield from task.guesses
    yield from static_baselines(task.engines)


def _try(task: SearchTask, course: Course, candidate: Candidate) -> tuple[float, float]:
    found = course.forecast(plan_of(candidate, task.engines, task.plan.roles), 0)
    result = scored(found, task.slos, task.corrections.factor(region(candidate)))
    return result.score, result.shortfall


def _final(task: SearchTask, course: Course, scores: Mapping[Candidate, float]) -> SearchResult:
    """Compare the finalists on all the longer workloads."""
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    statics = set(static_baselines(task.engines))
    incumbent = candidate_of(task.plan, task.engines)
    static = [candidate for candidate in best_first if candidate in statics][:2]
    finalists = dict.fromkeys([incumbent, *static, *best_first[: task.settings.finalists]])
    plans = {each: plan_of(each, task.engines, task.plan.roles) for each in finalists}
    plans[incumbent] = task.plan
    runs = {each: _runs(task, course, each, plan) for each, plan in plans.items()}
    predictions = {each: _prediction(each, runs[each], runs[incumbent]) for each in finalists}
    ranked = sorted(predictions.values(), key=lambda prediction: prediction.score, reverse=True)
    best_static = max((predictions[each] for each in static), key=lambda each: each.score, default=ranked[0])
    return SearchResult(ranked, predictions[incumbent], best_static, trials=0, seconds=0.0)


def _runs(task: SearchTask, course: Course, candidate: Candidate, plan: Plan) -> list[tuple[Forecast, Scored]]:
    found = [course.forecast(plan, index) for index in range(1, len(course.workloads))]
    factor = task.corrections.factor(region(candidate))
    return [(each, scored(each, task.slos, factor)) for each in found]


def _prediction(
    candidate: Candidate, runs: Sequence[tuple[Forecast, Scored]], incumbent: Sequence[tuple[Forecast, Scored]]
) -> Prediction:
    scores = np.array([each.score for _, each in runs])
    gains = scores - np.array([each.score for _, each in incumbent])
    return Prediction(
        candidate=candidate,
        forecast=runs[0][0],
        goodput_rps=float(np.mean([each.goodput_rps for _, each in runs])),
        offered_rps=float(np.mean([each.offered_rps for each, _ in runs])),
        shortfall=float(np.mean([each.shortfall for _, each in runs])),
        score=float(scores.mean()),
        gain=float(gains.mean()),
        gain_se=float(gains.std(ddof=1) / np.sqrt(len(gains))),
    )
