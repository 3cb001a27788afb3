"""The search over plans, on traffic made for the purpose."""

import numpy as np
import pytest

from engines.emulated.profile import load_profile
from tuner.candidates import candidate_of, data_parallel, explicit_knobs, plan_of, split, static_baselines
from tuner.plan import BOOTSTRAP_PLAN
from tuner.search import Course, search, what_if
from tuner.settings import TunerSettings
from tuner.slo import Slo, SloTable
from tuner.task import SearchTask
from tuner.twin.fast import simulate
from tuner.twin.forecast import forecast
from tuner.twin.types import TwinEngine
from tuner.types import EngineState
from tuner.workload import Workload

PROFILE = load_profile("a100-tp4-llama-2-70b")
FLEET = [EngineState(f"e{number}", PROFILE.kind, PROFILE) for number in range(8)]
KNOBS = explicit_knobs(FLEET)
SLOS = SloTable(version=1, classes={"default": Slo(ttft_ms=1000, tpot_ms=60)})
MINUTES_S = 300.0


def writing(rate_rps: float, span_s: float, seed: int = 1, output_tokens: int = 600) -> Workload:
    """Short prompts with answers that take half a minute and more."""
    rng = np.random.default_rng(seed)
    count = int(rate_rps * span_s)
    arrived_s = np.sort(rng.uniform(0, span_s, count))
    columns = {
        "prompt_tokens": rng.integers(50, 600, count),
        "output_tokens": rng.geometric(1 / output_tokens, count),
        "slo_class": np.zeros(count, dtype=np.int64),
        "session": np.arange(count),
        "root": np.arange(count),
        "root_tokens": np.zeros(count, dtype=np.int64),
    }
    return Workload(span_s, ("default",), arrived_s, **columns)


def task_of(workload: Workload, **given) -> SearchTask:
    return SearchTask(workload=workload, engines=FLEET, slos=SLOS, plan=BOOTSTRAP_PLAN, **given)


def still_clock() -> float:
    return 0.0


def in_the_long_run(workload: Workload, plan) -> float:
    """Share of good requests, away from the beginning and the end of a long simulation."""
    fleet = [TwinEngine(each.engine_id, each.profile) for each in FLEET]
    rows = (workload.arrived_s > 0.4 * workload.span_s) & (workload.arrived_s < 0.7 * workload.span_s)
    timeline = simulate(workload, fleet, plan, SLOS).take(rows)
    found = forecast(workload.take(rows, 0.3 * workload.span_s), timeline, SLOS, fleet, plan)
    return found.goodput_rps / found.offered_rps


@pytest.mark.parametrize("candidate", [data_parallel(8, KNOBS), split(8, 2, 0.0, KNOBS), split(8, 3, 0.0, KNOBS)])
def test_a_forecast_is_of_a_fleet_that_is_as_full_as_it_gets(candidate):
    """Answers take so long that an idle fleet looks fine for most of a minute, whatever the plan."""
    plan = plan_of(candidate, FLEET)
    settled = in_the_long_run(writing(31, 2 * MINUTES_S), plan)
    (found,) = what_if(writing(31, 60), FLEET, SLOS, [plan], TunerSettings(max_simulated_requests=20_000))
    assert found.goodput_rps / found.offered_rps == pytest.approx(settled, abs=0.2)


def test_the_plans_of_the_forecasts_above_are_told_apart():
    plans = [plan_of(each, FLEET) for each in (data_parallel(8, KNOBS), split(8, 2, 0.0, KNOBS))]
    worse, better = (in_the_long_run(writing(31, 2 * MINUTES_S), plan) for plan in plans)
    assert better - worse > 0.3


def test_a_search_finds_a_plan_that_serves_what_the_plan_in_force_does_not():
    found = search(task_of(writing(31, MINUTES_S)), still_clock)
    best = found.ranked[0]
    assert best.goodput_rps > 1.3 * found.incumbent.goodput_rps
    assert best.gain > 0
    assert best.score >= found.best_static.score
    assert found.trials > len(list(static_baselines(FLEET)))


def test_the_same_task_gives_the_same_answer():
    once, again = (search(task_of(writing(20, 60), seed=7), still_clock) for _ in range(2))
    assert [each.candidate for each in once.ranked] == [each.candidate for each in again.ranked]


def test_a_search_out_of_time_still_compares_the_plan_in_force_with_another():
    ticks = iter(np.arange(0.0, 1e6, 100.0))
    found = search(task_of(writing(5, 60)), lambda: float(next(ticks)))
    candidates = {each.candidate for each in found.ranked}
    assert candidate_of(BOOTSTRAP_PLAN, FLEET) in candidates
    assert len(candidates) >= 2


def test_the_forecast_of_a_plan_is_of_traffic_at_the_rate_that_was_seen():
    """What clients got is held against it; the workloads after the first are faster and slower."""
    course = Course.of(task_of(writing(1, 30, output_tokens=5)), simulate)
    seen, first, faster, slower = (each.edge_s for each in course.stretches[:4])
    assert faster < first == seen < slower


@pytest.mark.parametrize("rate_rps", [20, 90, 400])
def test_after_a_shift_plans_for_any_rate_are_compared_behind_what_piled_up(rate_rps):
    settings = TunerSettings(max_simulated_requests=500, trials=3)
    course = Course.of(task_of(writing(rate_rps, 30), settings=settings, backlog_s=10.0), simulate)
    for stretch in course.stretches:
        assert stretch.counted().any()
        assert stretch.workload.span_s > 2 * stretch.edge_s
    assert search(task_of(writing(rate_rps, 30), settings=settings, backlog_s=10.0), still_clock).ranked


def test_simulations_stay_within_the_bound_on_requests():
    longest = 0

    def counting(workload, fleet, plan, slos):
        nonlocal longest
        longest = max(longest, len(workload))
        return simulate(workload, fleet, plan, slos)

    search(
        task_of(writing(200, 30), settings=TunerSettings(max_simulated_requests=500, trials=3)), still_clock, counting
    )
    assert 0 < longest < 1.3 * 500
