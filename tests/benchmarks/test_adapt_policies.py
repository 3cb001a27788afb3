"""Every policy on a tiny scenario: that they see the same arrivals, and do what they are named for."""

import itertools
from pathlib import Path

import grimp
import msgspec
import numpy as np
import pytest

import tuner
from benchmarks.adapt import hindsight
from benchmarks.adapt.closed_loop import EPOCH_S, ClosedLoop, arrival_batch, run_trimtab
from benchmarks.adapt.generate import generate
from benchmarks.adapt.hindsight import BEST_STATIC, ORACLE, THRESHOLD, Course, Grid
from benchmarks.adapt.jobs import POLICIES, Job, assembled, jobs_of, run_job
from benchmarks.adapt.keeping import TUNER, WORLD, files_of, kept_name, load_outcomes, save_outcomes
from benchmarks.adapt.outcome import TICK_S, Change, Outcome
from benchmarks.adapt.scenarios import load_scenario
from benchmarks.adapt.statics import (
    Scored,
    describe,
    fixed_plan,
    patterns,
    refinements,
    score,
    states,
)
from benchmarks.adapt.world import ThresholdFleet, run_threshold, with_min_remote
from engines.types import Role
from tuner.candidates import data_parallel, explicit_knobs, split
from tuner.plan import DATA_PARALLEL, Admission, HotPrefix, Policy
from tuner.settings import TunerSettings
from tuner.twin.prompts import prefix_hash
from tuner.twin.reference import ReferenceFleet
from tuner.workload import Workload

SEED = 3


@pytest.fixture(scope="module")
def scenario():
    """Summaries on four engines, for forty seconds."""
    return load_scenario("summaries").shortened(40, 1)


@pytest.fixture(scope="module")
def workload(scenario):
    return generate(scenario, SEED)


def ticking():
    """A clock that says each look at it took a hundredth of a second."""
    return (n * 0.01 for n in itertools.count()).__next__


def test_the_grid_holds_every_pattern_policy_ratio_and_split(scenario):
    found = list(patterns(scenario.fleet))
    assert {each.knobs.policy for each in found if each.pattern == DATA_PARALLEL} == set(Policy)
    splits = {(each.prefill_engines, each.knobs.offload_ratio) for each in found if each.pattern != DATA_PARALLEL}
    assert splits == set(itertools.product((1, 2, 3), (0.0, 0.1, 0.2, 0.3, 0.5)))
    assert all(each.prefill_engines + each.decode_engines + each.mixed_engines == 4 for each in found)
    for each in found:
        fixed_plan(each, scenario.fleet)


def test_refinements_turn_every_other_knob_and_leave_pattern_ratio_and_prefill_engines(scenario):
    start = split(4, 3, 0.2, explicit_knobs(states(scenario.fleet)))
    found = list(refinements(start, scenario.fleet))
    assert {(each.pattern, each.prefill_engines, each.knobs.offload_ratio) for each in found} == {("balanced", 3, 0.2)}
    assert {each.knobs.admission for each in found} == {Admission.OFF, Admission.SHED}
    assert len({each.knobs.chunked_prefill_tokens for each in found}) >= 2
    assert len({each.knobs.prefill_decode_interval for each in found}) >= 2
    assert len({each.knobs.min_remote_tokens for each in found}) >= 3
    assert {each.mixed_engines for each in found} == {0, 1}
    assert start in found


def test_candidates_are_scored_best_first(scenario, workload):
    knobs = explicit_knobs(states(scenario.fleet))
    good, bad = split(4, 3, 0.0, knobs), split(4, 1, 0.0, knobs)
    ranked = score([bad, good], workload, scenario.fleet, scenario.slos, _reference)
    assert [each.candidate for each in ranked] == [good, bad]
    assert ranked[0].attainment > 0.9 > ranked[1].attainment


def _reference(*arguments):
    from tuner.twin.reference import simulate_reference

    return simulate_reference(*arguments)


def test_a_description_names_what_is_unusual(scenario):
    knobs = explicit_knobs(states(scenario.fleet)).model_copy(
        update={"min_remote_tokens": 512, "admission": Admission.SHED, "prefill_decode_interval": 4}
    )
    assert describe(split(4, 3, 0.1, knobs)) == "balanced 0.1, 3P 1D, remote from 512, shed, chunk 8,192, interval 4"
    assert describe(data_parallel(4, knobs)).startswith("data_parallel, ")


def test_the_best_plan_is_the_one_that_is_best_on_the_whole_workload(scenario, workload):
    knobs = explicit_knobs(states(scenario.fleet))
    good, bad = split(4, 3, 0.0, knobs), split(4, 1, 0.0, knobs)
    mistaken = [Scored(bad, 0.99), Scored(good, 0.98)]
    course = Course(workload, scenario.fleet, scenario.slos)
    assert course.best_fixed(BEST_STATIC, Grid(mistaken, mistaken)).plan == describe(good)


def test_the_threshold_rule_sends_short_prompts_away_only_while_the_prefill_queue_is_short(scenario, workload):
    plan = fixed_plan(split(4, 1, 0.0, explicit_knobs(states(scenario.fleet))), scenario.fleet)
    world = ThresholdFleet(scenario.fleet, plan, scenario.slos)
    (prefill,) = [engine for engine in world.engines if engine.view.role is Role.PREFILL]
    assert world.plan_for_arrival().knobs.min_remote_tokens == 0
    prefill.view.pending_prefill_tokens = 5000
    assert world.plan_for_arrival().knobs.min_remote_tokens == 2048


def test_the_threshold_rule_is_no_fixed_plan(scenario):
    """Chat on one prefill engine: with the rule, some prompts go there and some do not."""
    chat = load_scenario("chat").shortened(20, 1)
    candidate = split(4, 1, 0.0, explicit_knobs(states(chat.fleet)))
    world = ThresholdFleet(chat.fleet, fixed_plan(candidate, chat.fleet), chat.slos)
    world.offer(generate(chat, SEED))
    remote = [record.prefill_engine is not None for record in world.advance()]
    assert any(remote)
    outcome = run_threshold(THRESHOLD, candidate, generate(chat, SEED), chat.fleet, chat.slos)
    assert len(outcome.good) == len(remote)


def test_a_minimum_of_remote_tokens_leaves_the_rest_of_a_plan(scenario):
    plan = fixed_plan(split(4, 1, 0.2, explicit_knobs(states(scenario.fleet))), scenario.fleet)
    assert with_min_remote(with_min_remote(plan, 2048), 0) == plan


def test_arrival_records_agree_with_the_records_that_follow(scenario, workload):
    world = ReferenceFleet(scenario.fleet, fixed_plan(next(patterns(scenario.fleet)), scenario.fleet), scenario.slos,
                           keep_samples=True)  # fmt: skip
    world.offer(workload)
    records = {record.request_id: record for each in world.advance() for record in [each.request_record(EPOCH_S)]}
    batch = arrival_batch(world.take_arrivals())
    assert set(batch.request_ids) == records.keys()
    for at, request_id in enumerate(batch.request_ids):
        record = records[request_id]
        assert record.arrived_at_s == batch.arrived_at_s[at]
        assert record.prompt_tokens == batch.prompt_tokens[at]
        assert (record.prefix_hashes or ()) == batch.prefix_hashes[at]


def test_trimtab_comes_from_a_cold_start_to_a_plan_that_serves_better(scenario, workload):
    settings = TunerSettings(trials=12, finalists=2, replicas=2)
    found = run_trimtab(workload, scenario.fleet, scenario.slos, ticking(), settings)
    assert len(found.good) == len(workload)
    assert found.changes
    first = found.changes[0]
    later = workload.arrived_s > first.at_s + 5
    assert found.good[later].mean() > found.good[~later].mean()
    assert found.thought_s > 0


def test_thinking_delays_the_plan_but_by_no_more_than_a_tick(scenario, workload):
    settings = TunerSettings(trials=12, finalists=2, replicas=2, budget_s=1000)
    slow = (n * 30.0 for n in itertools.count()).__next__
    loop = ClosedLoop(scenario.fleet, scenario.slos, slow, settings)
    loop.offer(workload)
    for tick in range(1, 9):
        loop.tick(TICK_S * tick)
    assert loop.changes
    assert all(change.at_s % TICK_S == 0 for change in loop.changes)
    loop.finish()


def test_copies_that_a_plan_asks_for_are_found_in_the_caches(scenario):
    loop = ClosedLoop(scenario.fleet, scenario.slos, ticking(), TunerSettings())
    count = 8
    request = Workload(
        span_s=8.0,
        classes=("default",),
        arrived_s=np.arange(count, dtype=float),
        prompt_tokens=np.full(count, 1200),
        output_tokens=np.full(count, 2),
        slo_class=np.zeros(count, dtype=np.int64),
        session=np.arange(count),
        root=np.full(count, 7),
        root_tokens=np.full(count, 1024),
    )
    loop.offer(request.take(slice(0, 1)))
    (record,) = loop.finish()
    served = record.decode_engine
    others = tuple(engine.engine_id for engine in scenario.fleet if engine.engine_id != served)
    hot = HotPrefix(prefix=f"{prefix_hash(record.blocks[7]):016x}", blocks=8, engines=others)
    loop.plan = loop.plan.model_copy(update={"replicas": (hot,)})
    loop._copy()
    loop.world.offer(request.take(slice(1, count)))
    assert {each.cached_tokens for each in loop.world.advance()} == {1024}


def test_the_same_clock_gives_the_same_run(scenario, workload):
    settings = TunerSettings(trials=12, finalists=2, replicas=2)
    one, other = (run_trimtab(workload, scenario.fleet, scenario.slos, ticking(), settings) for _ in range(2))
    assert np.array_equal(one.good, other.good)
    assert one.changes == other.changes


def test_jobs_cover_what_was_asked_for_and_no_more():
    shifting = load_scenario("shift-day")
    everything = jobs_of(shifting, SEED, frozenset(POLICIES))
    assert sum(ORACLE in job.policies for job in everything) == len(shifting.phases)
    assert frozenset().union(*(job.policies for job in everything)) == set(POLICIES)
    assert [job.policies for job in jobs_of(shifting, SEED, frozenset({"trimtab"}))] == [{"trimtab"}]


def test_the_oracle_is_its_phases_one_after_the_other():
    parts = [Outcome(ORACLE, "a", np.array([True, False])), Outcome(ORACLE, "b", np.array([True]))]
    whole = assembled(parts)
    assert whole.good.tolist() == [True, False, True]
    assert whole.plan == "a; b"


def test_outcomes_can_be_kept(tmp_path):
    change = Change(5.0, "drift", "data_parallel", "a sentence")
    outcome = Outcome("trimtab", "a plan", np.array([True, False]), [change], 0.25)
    file = tmp_path / "deep" / "kept.npz"
    save_outcomes(file, [outcome])
    (loaded,) = load_outcomes(file)
    assert np.array_equal(loaded.good, outcome.good)
    for name in ("policy", "plan", "changes", "thought_s"):
        assert getattr(loaded, name) == getattr(outcome, name)


def test_kept_outcomes_are_not_used_for_other_code():
    some, more = ("benchmarks/adapt/*.py",), ("benchmarks/adapt/*.py", "tuner/plan.py")
    assert kept_name("a", [1], some) == kept_name("a", [1], some)
    assert len({kept_name("a", [1], some), kept_name("a", [1], more), kept_name("a", [2], some)}) == 3


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("benchmarks.adapt.generate", WORLD),
        ("benchmarks.adapt.hindsight", WORLD),
        ("benchmarks.adapt.closed_loop", (*WORLD, *TUNER)),
    ],
)
def test_what_is_kept_depends_on_all_the_code_that_makes_it(module, code):
    """Or yesterday's outcomes would stand beside today's."""
    graph = grimp.build_graph("engines", "tuner", "controller", "benchmarks")
    root = Path(tuner.__file__).parents[1]
    named = {".".join(file.relative_to(root).with_suffix("").parts) for file in files_of(code)}
    missing = (graph.find_upstream_modules(module) | {module}) - named
    assert not [each for each in missing if not graph.find_children(each)]


def test_kept_outcomes_are_not_used_for_other_arrivals(tmp_path, scenario, monkeypatch):
    monkeypatch.setattr(hindsight, "REFINED", 0)
    job = Job(scenario, SEED, frozenset({ORACLE}), 0)
    run_job(job, tmp_path)
    (file,) = tmp_path.iterdir()
    save_outcomes(file, [Outcome(ORACLE, "from the folder", np.array([True]))])
    assert run_job(job, tmp_path)[0].plan == "from the folder"
    slower = msgspec.structs.replace(scenario, phases=[msgspec.structs.replace(scenario.phases[0], rate_rps=1.0)])
    assert run_job(Job(slower, SEED, job.policies, 0), tmp_path)[0].plan != "from the folder"
    assert run_job(Job(scenario, SEED + 1, job.policies, 0), tmp_path)[0].plan != "from the folder"
