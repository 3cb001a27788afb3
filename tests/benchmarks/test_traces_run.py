"""Cells of the traces benchmark: fixed plans on large fleets, outcomes that are kept, goals and tables."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.adapt import hindsight
from benchmarks.adapt.outcome import Change, Outcome
from benchmarks.adapt.statics import fixed_plan
from benchmarks.traces import cells
from benchmarks.traces.catalog import load_traces
from benchmarks.traces.cells import FIXED, POLICIES, Cell, Job, bounds_of, course_of, grid_of, pieces, run_job
from benchmarks.traces.run import QUICK, SPANS_S, all_cells
from benchmarks.traces.slos import LEVELS
from benchmarks.traces.summary import Played, Source, report
from engines.types import Role

SEED = 3
CELL = Cell("azure-conversation", 4, "loose", 20.0)


def outcome(policy, share):
    good = np.arange(100) < 100 * share
    changes = [Change(5.0, "better_plan", "disaggregated", "why")] if policy == "trimtab" else []
    return Outcome(policy, "a plan", good, changes)


def played(trimtab, best=1.0, threshold=1.0, cell=CELL, generated=False):
    shares = {"data_parallel": 0.5, "disaggregated": 0.8, "balanced": 0.4, "best_static": best, "threshold": threshold}
    return Played(
        cell=cell,
        trace=load_traces()[cell.trace],
        source=Source(generated=generated, skipped=2, requests=1000),
        slos=bounds_of(cell.trace, cell.level),
        requests=100,
        outcomes={policy: outcome(policy, share) for policy, share in {**shares, "trimtab": trimtab}.items()},
    )


def test_all_cells_are_every_trace_at_every_size_and_level():
    found = all_cells()
    assert len(found) == len(load_traces()) * len(SPANS_S) * len(LEVELS) == len({cell.name for cell in found})
    assert {cell.trace for cell in QUICK} <= set(load_traces())


def test_goals_are_means_over_the_cells_of_a_trace():
    other = played(0.9, threshold=0.6, cell=replace(CELL, engines=16))
    to_best, to_rule = report([played(1.0), other], 1, {}).goals
    assert (to_best.value, to_best.met) == (pytest.approx(0.95), False)
    assert (to_rule.value, to_rule.met) == (pytest.approx(1.25), True)


def test_the_report_names_the_source_and_whether_it_was_used():
    real, made = (report([played(1.0, generated=generated)], 1, {}) for generated in (False, True))
    for each in (real, made):
        assert load_traces()[CELL.trace].source in each.markdown()
        assert "2 of 1,002 requests do not fit" in each.markdown()
    assert "The trace itself" in real.markdown()
    assert "Load generated with the statistics" in made.markdown()
    assert "(generated)" in made.headline[0]
    assert "(generated)" not in real.headline[0]


def test_json_has_a_row_for_each_policy_with_figures_and_plans():
    rows = json.loads(report([played(0.9)], 1, {}).json())["results"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    last = rows[-1]
    assert (last["trace"], last["engines"], last["level"]) == (CELL.trace, 4, "loose")
    assert (last["goodput_rps"], last["attainment"]) == (4.5, 0.9)
    assert last["changes"] == [{"at_s": 5.0, "reason": "better_plan", "plan": "disaggregated"}]


def test_a_cell_is_screened_in_pieces_that_make_it_whole():
    workload = course_of(replace(CELL, span_s=400.0), SEED, None).workload
    found = pieces(workload)
    assert [piece.span_s for piece in found] == [150, 150, 100]
    assert sum(len(piece) for piece in found) == len(workload)


@pytest.mark.timeout(600)  # the twin is compiled if nothing on disk fits its sources
def test_a_fleet_beyond_what_is_screened_gets_multiples_of_a_smaller_ones_plans(monkeypatch):
    monkeypatch.setattr(hindsight, "REFINED", 0)
    monkeypatch.setattr(cells, "SCREENED", 4)
    job = Job(replace(CELL, engines=8), FIXED, SEED, None)
    course = course_of(job.cell, SEED, None)
    found = grid_of(job, course).plain
    splits = {each.candidate.prefill_engines for each in found}
    assert splits <= {0, 2, 4, 6}
    assert splits - {0}
    for each in found:
        plan = fixed_plan(each.candidate, course.fleet)
        roles = [plan.role_of(engine.engine_id) for engine in course.fleet]
        assert roles.count(Role.PREFILL) == each.candidate.prefill_engines


@pytest.mark.timeout(600)
def test_outcomes_of_fixed_plans_are_kept_for_the_same_cell_only(tmp_path, monkeypatch):
    monkeypatch.setattr(hindsight, "REFINED", 0)
    job = Job(replace(CELL, engines=2), frozenset({"data_parallel"}), SEED, None)
    (found,) = run_job(job, tmp_path)
    assert len(found.good) == len(course_of(job.cell, SEED, None).workload)
    (file,) = tmp_path.iterdir()
    run_job(job, tmp_path)
    assert [file] == list(tmp_path.iterdir())
    run_job(replace(job, seed=SEED + 1), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
