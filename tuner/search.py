"""The search: which plan would have served the recent traffic best. Optuna proposes, the twin answers.

Two stages. Many candidates are run on one short workload; the best few, the plan in force and the best static baseline
are then compared on several bootstrapped workloads, the same for all, so that the noise of the traffic cancels out of
their differences and the luck of the first stage does not count.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import optuna
from numpy.typing import NDArray

from tuner.bounds import bounds_s
from tuner.candidates import candidate_of, explicit_knobs, oddities, plan_of, region, static_baselines
from tuner.plan import Plan
from tuner.replication import worth_copying
from tuner.scoring import Scored, scored
from tuner.settings import TunerSettings
from tuner.slo import SloTable
from tuner.space import Space
from tuner.task import SearchTask
from tuner.twin.fast import simulate
from tuner.twin.forecast import forecast
from tuner.twin.types import Fleet, Forecast, Simulator, TwinEngine
from tuner.types import Candidate, EngineState, Prediction, SearchResult
from tuner.workload import Workload

__all__ = ["SearchTask", "search", "what_if"]

Clock = Callable[[], float]

NEARLY_ALL = 0.9

SHORT = 0.5
"""What is counted of the first stage's workload to what is counted of the second's."""

DOUBT_Z = 1.5
MOST_DOUBT = 0.25
"""How far rates of the second stage's workloads lie from what was seen: a rate known from few requests may be off.

Running short of room costs more than having some to spare, so that a plan with room wins while little is known."""
DOUBTS = (0, 1, -1)
"""By turns. The first workload has the rate that was seen: what it gives is what is compared with what clients got."""

FEWEST = 2
STATIC_FINALISTS = 2

optuna.logging.set_verbosity(optuna.logging.WARNING)


def search(task: SearchTask, clock: Clock, run: Simulator = simulate) -> SearchResult:
    """The best plans for the task's workload. `clock` is only read for the time budget. `ValueError`: no engines."""
    began_s = clock()
    replicas = worth_copying(task)  # first, so that what it takes comes off the budget of the rest
    course = Course.of(task, run)
    scores = Exploration(task, course).run(lambda: clock() - began_s)
    found = _final(task, course, scores)
    return replace(found, trials=len(scores), seconds=clock() - began_s, replicas=replicas)


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
    course = Course(_fleet(engines), slos, _stretches(workload, slos, settings, 1.0, settings.seed, 1), run)
    return [course.forecast(plan, 0) for plan in plans]


class Stretch(NamedTuple):
    """Simulated traffic. A simulation begins with an idle fleet and ends with one that empties: what arrives within
    `edge_s` of either end does not show how requests fare between others, and is not counted."""

    workload: Workload
    edge_s: float
    backlog_s: float

    def counted(self) -> NDArray[np.bool_]:
        arrived_s, span_s = self.workload.arrived_s, self.workload.span_s
        return (arrived_s >= self.edge_s) & (arrived_s < span_s - self.edge_s)

    def rushed(self) -> Self:
        """What arrives in the first `backlog_s` is there from the beginning, as in the fleet that a plan is for."""
        return self._replace(workload=self.workload.rushed(self.backlog_s))

    def at_rate(self, factor: float) -> Self:
        return self._replace(workload=self.workload.at_rate(factor), edge_s=self.edge_s / factor)


def _stretches(
    workload: Workload,
    slos: SloTable,
    settings: TunerSettings,
    size: float,
    seed: int,
    count: int,
    backlog_s: float = 0.0,
) -> list[Stretch]:
    """Bootstrapped traffic, of which `size` of the settings' horizon counts, or less if there is too much of it."""
    edge_s, counted_s = _lasting_s(workload, slos), size * settings.horizon_s
    span_s = backlog_s + counted_s + 2 * edge_s
    shrunk = min(1.0, settings.max_simulated_requests / max(workload.rate_rps, 1e-9) / span_s)
    rng = np.random.default_rng(seed)
    return [
        Stretch(workload.bootstrap(rng, shrunk * span_s), shrunk * edge_s, shrunk * backlog_s) for _ in range(count)
    ]


def _lasting_s(workload: Workload, slos: SloTable) -> float:
    """What nearly all requests take at most if they meet their bounds: an idle fleet is then as full as it gets."""
    ttft_s, tpot_s = bounds_s(slos, workload.classes, workload.slo_class)
    return float(np.quantile(ttft_s + tpot_s * workload.output_tokens, NEARLY_ALL))


@dataclass(frozen=True, slots=True)
class Course:
    """What candidates run; the first is the short stretch of the first stage."""

    fleet: Fleet
    slos: SloTable
    stretches: Sequence[Stretch]
    run: Simulator

    @classmethod
    def of(cls, task: SearchTask, run: Simulator) -> "Course":
        known = (task.workload, task.slos, task.settings)
        doubt = min(MOST_DOUBT, DOUBT_Z / math.sqrt(max(1, len(task.workload))))
        longer = _stretches(*known, 1.0, task.seed + 1, task.settings.replicas, task.backlog_s)
        unsure = [each.at_rate(1 + doubt * DOUBTS[number % 3]) for number, each in enumerate(longer)]
        stretches = [*_stretches(*known, SHORT, task.seed, 1, task.backlog_s), *unsure]
        return cls(_fleet(task.engines), task.slos, [each.rushed() for each in stretches], run)

    def forecast(self, plan: Plan, index: int) -> Forecast:
        stretch = self.stretches[index]
        workload, rows = stretch.workload, stretch.counted()
        timeline = self.run(workload, self.fleet, plan, self.slos).take(rows)
        counted = workload.take(rows, workload.span_s - 2 * stretch.edge_s)
        return forecast(counted, timeline, self.slos, self.fleet, plan)


def _fleet(engines: Sequence[EngineState]) -> list[TwinEngine]:
    if not engines:
        raise ValueError("no engine to plan for")
    return [TwinEngine(engine.engine_id, engine.profile) for engine in engines]


class Exploration:
    """The first stage: many candidates on the short workload. Guesses and baselines, then what Optuna proposes.

    Every other proposal is a step away from the best so far: near a good plan there often is a better one.
    """

    def __init__(self, task: SearchTask, course: Course) -> None:
        self._task = task
        self._course = course
        self._space = Space(task.engines)
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=task.seed))
        self._rng = np.random.default_rng(task.seed)
        self._scores: dict[Candidate, float] = {}

    def run(self, elapsed_s: Callable[[], float]) -> dict[Candidate, float]:
        """Scores of all candidates that there was time for; the guesses come first, and at least two are tried."""
        guesses = iter(self._first())
        quickest_s, began_s = math.inf, elapsed_s()
        for number in range(self._task.settings.trials):
            if number >= FEWEST and self._time_is_up(began_s, quickest_s):
                break
            guess = next(guesses, None)
            if guess is not None:
                self._study.enqueue_trial(self._space.parameters(guess))
            elif number % 2:
                self._study.enqueue_trial(self._space.neighbour(self._best(), self._rng))
            self._try()
            ended_s = elapsed_s()
            quickest_s, began_s = min(quickest_s, ended_s - began_s), ended_s
        return self._scores

    def _time_is_up(self, elapsed_s: float, trial_s: float) -> bool:
        """Leave enough for the second stage, whose runs are on longer workloads.

        The quickest trial tells what a run costs: others may hold a first import or another process's turn.
        """
        settings = self._task.settings
        final_runs = (settings.finalists + STATIC_FINALISTS + 1) * settings.replicas
        return elapsed_s + final_runs * trial_s / SHORT > settings.budget_s

    def _first(self) -> Iterator[Candidate]:
        yield candidate_of(self._task.plan, self._task.engines)
        yield from self._task.guesses
        yield from static_baselines(self._task.engines)

    def _try(self) -> None:
        trial = self._study.ask()
        candidate = self._space.candidate(trial)
        if candidate in self._scores:
            self._study.tell(trial, self._scores[candidate])
            return
        plan = plan_of(candidate, self._task.engines, self._task.plan.roles)
        factor = self._task.corrections.factor(region(candidate))
        odd = oddities(candidate, explicit_knobs(self._task.engines))
        found = scored(self._course.forecast(plan, 0), self._task.slos, factor, odd)
        trial.set_constraint("attainment", found.shortfall)
        self._study.tell(trial, found.score)
        self._scores[candidate] = found.score

    def _best(self) -> Candidate:
        return max(self._scores, key=self._scores.__getitem__)


def _final(task: SearchTask, course: Course, scores: Mapping[Candidate, float]) -> SearchResult:
    """Compare the finalists on all the longer workloads."""
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    statics = set(static_baselines(task.engines))
    incumbent = candidate_of(task.plan, task.engines)
    static = [candidate for candidate in best_first if candidate in statics][:STATIC_FINALISTS]
    finalists = dict.fromkeys([incumbent, *static, *best_first[: task.settings.finalists]])
    plans = {each: plan_of(each, task.engines, task.plan.roles) for each in finalists}
    plans[incumbent] = task.plan
    runs = {each: _runs(task, course, each, plan) for each, plan in plans.items()}
    predictions = {each: _prediction(each, runs[each], runs[incumbent]) for each in finalists}
    ranked = sorted(predictions.values(), key=lambda prediction: prediction.score, reverse=True)
    best_static = max((predictions[each] for each in static), key=lambda each: each.score, default=ranked[0])
    return SearchResult(ranked, predictions[incumbent], best_static, trials=0, seconds=0.0)


def _runs(task: SearchTask, course: Course, candidate: Candidate, plan: Plan) -> list[tuple[Forecast, Scored]]:
    found = [course.forecast(plan, index) for index in range(1, len(course.stretches))]
    factor = task.corrections.factor(region(candidate))
    odd = oddities(candidate, explicit_knobs(task.engines))
    return [(each, scored(each, task.slos, factor, odd)) for each in found]


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
        least_gain=float(gains.min()),
    )
