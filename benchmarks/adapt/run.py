"""Runs every job of every scenario side by side, and puts the outcomes together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.adapt.generate import generate
from benchmarks.adapt.hindsight import ORACLE
from benchmarks.adapt.jobs import POLICIES, Job, assembled, jobs_of, run_job
from benchmarks.adapt.outcome import Outcome
from benchmarks.adapt.scenarios import Scenario, load_scenario, scenario_names
from benchmarks.adapt.summary import Compared, report
from benchmarks.machine import describe
from benchmarks.pool import side_by_side
from benchmarks.report import Report

QUICK = ("summaries", "shift-laptop")
QUICK_PHASE_S = 90.0
QUICK_PHASES = 2


@dataclass(frozen=True, slots=True)
class AdaptOptions:
    scenarios: Sequence[str]
    policies: Sequence[str]
    seed: int
    quick: bool
    kept: Path | None = None
    """Folder with outcomes that need not be measured again, as long as the code that made them is the same."""


def run_adapt(options: AdaptOptions) -> Report:
    """Raises `ScenarioError` for a data file that is wrong."""
    scenarios = [_sized(load_scenario(name), options.quick) for name in options.scenarios]
    jobs = [job for scenario in scenarios for job in jobs_of(scenario, options.seed, frozenset(options.policies))]
    done = dict(side_by_side(jobs, partial(run_job, kept=options.kept)))
    compared = [_compared(scenario, options, done) for scenario in scenarios]
    return report(compared, options.seed, describe())


def names(quick: bool) -> Sequence[str]:
    return QUICK if quick else scenario_names()


def _sized(scenario: Scenario, quick: bool) -> Scenario:
    return scenario.shortened(QUICK_PHASE_S, QUICK_PHASES) if quick else scenario


def _compared(scenario: Scenario, options: AdaptOptions, done: dict[Job, Sequence[Outcome]]) -> Compared:
    own = [(job, outcomes) for job, outcomes in done.items() if job.scenario is scenario]
    whole = {each.policy: each for job, outcomes in own if job.phase is None for each in outcomes}
    phases = {job.phase: outcomes[0] for job, outcomes in own if job.phase is not None}
    if phases:
        whole[ORACLE] = assembled([phases[at] for at in range(len(scenario.phases))])
    ordered = {policy: whole[policy] for policy in POLICIES if policy in whole}
    return Compared(scenario, generate(scenario, options.seed).arrived_s, ordered)
