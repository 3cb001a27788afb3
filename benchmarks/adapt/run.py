"""Runs every job of every scenario side by side, and puts the outcomes together."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.adapt.generate import generate
from benchmarks.adapt.hindsight import ORACLE
from benchmarks.adapt.jobs import POLICIES, Job, assembled, jobs_of, run_job
from benchmarks.adapt.outcome import Outcome
from benchmarks.adapt.scenarios import Scenario, load_scenario, scenario_names
from benchmarks.adapt.summary import Compared, report
from benchmarks.machine import available_cores, describe
from benchmarks.report import Report
from engines.parent import die_with

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
    done = dict(_all(jobs, options.kept))
    compared = [_compared(scenario, options, done) for scenario in scenarios]
    return report(compared, options.seed, describe())


def names(quick: bool) -> Sequence[str]:
    return QUICK if quick else scenario_names()


def _sized(scenario: Scenario, quick: bool) -> Scenario:
    return scenario.shortened(QUICK_PHASE_S, QUICK_PHASES) if quick else scenario


def _all(jobs: Sequence[Job], kept: Path | None) -> Iterator[tuple[Job, Sequence[Outcome]]]:
    """Every job with its outcomes, as they are done. The first that fails ends it all."""
    # Fresh processes: forked ones would share what compiled code and thread pools hold.
    context = multiprocessing.get_context("spawn")
    workers = min(len(available_cores()), len(jobs))
    with _progress() as progress, ProcessPoolExecutor(workers, context, die_with, (os.getpid(),)) as pool:
        task = progress.add_task("", total=len(jobs))
        largest_first = sorted(jobs, key=lambda job: -job.size)
        futures: dict[Future[Sequence[Outcome]], Job] = {pool.submit(run_job, job, kept): job for job in largest_first}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
                progress.update(task, advance=1, description=f"done: {futures[future].title}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compared(scenario: Scenario, options: AdaptOptions, done: dict[Job, Sequence[Outcome]]) -> Compared:
    own = [(job, outcomes) for job, outcomes in done.items() if job.scenario is scenario]
    whole = {each.policy: each for job, outcomes in own if job.phase is None for each in outcomes}
    phases = {job.phase: outcomes[0] for job, outcomes in own if job.phase is not None}
    if phases:
        whole[ORACLE] = assembled([phases[at] for at in range(len(scenario.phases))])
    ordered = {policy: whole[policy] for policy in POLICIES if policy in whole}
    return Compared(scenario, generate(scenario, options.seed).arrived_s, ordered)


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(stderr=True))
