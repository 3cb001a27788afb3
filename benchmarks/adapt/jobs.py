"""What is computed in processes of its own: one scenario under some policies. Arguments and results can be pickled."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.adapt.closed_loop import TRIMTAB, run_trimtab
from benchmarks.adapt.generate import generate, phases
from benchmarks.adapt.hindsight import BEST_STATIC, ORACLE, THRESHOLD, Course, Grid, screen
from benchmarks.adapt.keeping import TUNER, WORLD, kept_name, kept_or
from benchmarks.adapt.outcome import Outcome
from benchmarks.adapt.scenarios import Scenario
from benchmarks.adapt.statics import PATTERNS
from tuner.twin.fast import warm_up
from tuner.workload import concatenate

POLICIES = (*PATTERNS, BEST_STATIC, THRESHOLD, ORACLE, TRIMTAB)
FIXED = frozenset({*PATTERNS, BEST_STATIC, THRESHOLD})


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Some policies on a scenario; with `phase`, on that phase of it alone."""

    scenario: Scenario
    seed: int
    policies: frozenset[str]
    phase: int | None = None

    @property
    def title(self) -> str:
        where = "" if self.phase is None else f", phase {self.phase + 1}"
        return f"{self.scenario.name}{where}: {'fixed plans' if self.policies & FIXED else ', '.join(self.policies)}"

    @property
    def size(self) -> float:
        """About how long it takes beside others."""
        spans = [each.duration_s * each.rate_rps for each in self.scenario.phases]
        return sum(spans) if self.phase is None else spans[self.phase]


def jobs_of(scenario: Scenario, seed: int, policies: frozenset[str]) -> list[Job]:
    """All that a scenario needs, in pieces that can be done side by side."""
    jobs = []
    if TRIMTAB in policies:
        jobs.append(Job(scenario, seed, frozenset({TRIMTAB})))
    # Where the traffic does not move, the oracle is the best static plan.
    whole = FIXED if scenario.shifts else FIXED | {ORACLE}
    if policies & whole:
        jobs.append(Job(scenario, seed, policies & whole))
    if ORACLE in policies and scenario.shifts:
        jobs += [Job(scenario, seed, frozenset({ORACLE}), at) for at in range(len(scenario.phases))]
    return jobs


def run_job(job: Job, kept: Path | None = None) -> Sequence[Outcome]:
    """The outcome of each policy, taken from the folder `kept` if it is there."""
    warm_up()
    return kept_or(None if kept is None else kept / _kept_name(job), lambda: _outcomes(job))


def _outcomes(job: Job) -> Sequence[Outcome]:
    if TRIMTAB not in job.policies:
        return _hindsight(job)
    workload = generate(job.scenario, job.seed)
    return [run_trimtab(workload, job.scenario.fleet, job.scenario.slos, time.process_time)]


def assembled(parts: Sequence[Outcome]) -> Outcome:
    """The oracle from its phases, in order."""
    plans = "; ".join(part.plan for part in parts)
    return Outcome(ORACLE, plans, np.concatenate([part.good for part in parts]))


def _hindsight(job: Job) -> list[Outcome]:
    fleet, slos = job.scenario.fleet, job.scenario.slos
    parts = phases(job.scenario, job.seed)
    if job.phase is not None:
        only = parts[job.phase]
        return [Course(only, fleet, slos).best_fixed(ORACLE, screen([only], fleet, slos))]
    return fixed_outcomes(Course(concatenate(parts), fleet, slos), screen(parts, fleet, slos), job.policies)


def fixed_outcomes(course: Course, grid: Grid, policies: frozenset[str]) -> list[Outcome]:
    """Those of the policies that decide once or by rule, each with the best plan for the whole course."""
    found = course.best_patterns(grid)
    if THRESHOLD in policies and (rule := course.best_threshold(grid)) is not None:
        found.append(rule)
    if policies & {BEST_STATIC, ORACLE}:
        best = course.best_fixed(BEST_STATIC, grid)
        found += [best, replace(best, policy=ORACLE)]
    return [each for each in found if each.policy in policies]


def _kept_name(job: Job) -> str:
    scenario = job.scenario
    traffic = [scenario.phases, scenario.traffic, scenario.slos.model_dump(mode="json"), job.seed, job.phase]
    asked = [*traffic, scenario.engines, scenario.profile, sorted(job.policies)]
    code = (*WORLD, *TUNER) if TRIMTAB in job.policies else WORLD
    return kept_name(scenario.name, asked, code)
