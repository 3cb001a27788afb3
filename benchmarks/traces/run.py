"""Runs every cell's policies side by side, and puts the outcomes together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.outcome import Outcome
from benchmarks.machine import describe
from benchmarks.pool import side_by_side
from benchmarks.report import Report
from benchmarks.traces.catalog import load_traces
from benchmarks.traces.cells import FIXED, POLICIES, Base, Cell, Job, base_of, bounds_of, course_of, run_job
from benchmarks.traces.slos import LEVELS
from benchmarks.traces.summary import Played, Source, report

SPANS_S: Mapping[int, float] = {4: 600.0, 16: 300.0, 64: 150.0}
"""Engines -> seconds simulated: the larger the fleet, the more requests a second of it takes."""
QUICK = [Cell("azure-conversation", 4, "tight", 120.0)]


@dataclass(frozen=True, slots=True)
class TracesOptions:
    seed: int
    folder: Path | None
    """Of the traces; without one, or where a file is not there, load is generated."""
    cells: Sequence[Cell]
    kept: Path | None = None
    """Folder with outcomes that need not be measured again, as long as the code that made them is the same."""


def all_cells() -> list[Cell]:
    return [Cell(*each, SPANS_S[each[1]]) for each in product(load_traces(), SPANS_S, LEVELS)]


def run_traces(options: TracesOptions) -> Report:
    """Raises `ScenarioError` for a data file and `TraceError` for a trace that is wrong."""
    bases = {trace: base_of(trace, options.seed, options.folder) for trace in {cell.trace for cell in options.cells}}
    jobs = [
        Job(cell, policies, options.seed, options.folder)
        for cell in options.cells
        for policies in (frozenset({TRIMTAB}), FIXED)
    ]
    done = list(side_by_side(jobs, partial(run_job, kept=options.kept)))
    played = [_played(cell, bases[cell.trace], options, done) for cell in options.cells]
    return report(played, options.seed, describe())


def _played(cell: Cell, base: Base, options: TracesOptions, done: Sequence[tuple[Job, Sequence[Outcome]]]) -> Played:
    found = {each.policy: each for job, outcomes in done if job.cell == cell for each in outcomes}
    trace = load_traces()[cell.trace]
    return Played(
        cell=cell,
        trace=trace,
        source=Source(generated=base.generated, skipped=base.skipped, requests=len(base.workload)),
        slos=bounds_of(cell.trace, cell.level),
        requests=len(course_of(cell, options.seed, options.folder).workload),
        outcomes={policy: found[policy] for policy in POLICIES if policy in found},
    )
