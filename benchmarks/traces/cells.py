"""One cell: a trace on a fleet under an SLO level, and what each policy makes of it."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from benchmarks.adapt.closed_loop import TRIMTAB, run_trimtab
from benchmarks.adapt.hindsight import BEST_STATIC, THRESHOLD, Course, Grid, screen
from benchmarks.adapt.jobs import fixed_outcomes
from benchmarks.adapt.keeping import TUNER, WORLD, kept_name, kept_or
from benchmarks.adapt.outcome import Outcome
from benchmarks.adapt.statics import PATTERNS, Scored
from benchmarks.traces.catalog import Trace, load_traces
from benchmarks.traces.like import like
from benchmarks.traces.read import read_trace
from benchmarks.traces.scale import scaled
from benchmarks.traces.slos import slos_of
from benchmarks.traces.statistics import load_statistics
from tuner.slo import SloTable
from tuner.twin.fast import warm_up
from tuner.twin.types import Fleet, TwinEngine
from tuner.workload import Workload

POLICIES = (*PATTERNS, BEST_STATIC, THRESHOLD, TRIMTAB)
FIXED = frozenset({*PATTERNS, BEST_STATIC, THRESHOLD})
PIECE_S = 150.0
"""Screening looks at the beginnings of pieces of this length, so that it sees bursts and pauses."""
SCREENED = 16
"""Engines in the largest fleet whose splits of roles are all screened; larger ones get multiples of its splits."""
SCREENING = ("benchmarks/traces/cells.py",)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is compared with what: all policies on this."""

    trace: str
    engines: int
    level: str
    span_s: float

    @property
    def name(self) -> str:
        return f"{self.trace}-{self.engines}-{self.level}"


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A trace, or load like it, at its own pace."""

    workload: Workload
    generated: bool
    skipped: int
    """Requests that do not fit into an engine and were left out."""


@dataclass(frozen=True, slots=True)
class Job:
    """Some policies on a cell."""

    cell: Cell
    policies: frozenset[str]
    seed: int
    folder: Path | None
    """Of the traces."""

    @property
    def title(self) -> str:
        return f"{self.cell.name}: {'fixed plans' if self.policies & FIXED else ', '.join(self.policies)}"

    @property
    def size(self) -> float:
        """About how long it takes beside others."""
        return self.cell.engines * self.cell.span_s


def base_of(trace: str, seed: int, folder: Path | None) -> Base:
    """From the folder if the file is there. Raises `TraceError` if it is but cannot be used."""
    described = load_traces()[trace]
    file = None if folder is None else folder / described.file
    real = file is not None and file.exists()
    whole = read_trace(file, seed) if file is not None and real else like(load_statistics(trace), seed)
    fits = whole.prompt_tokens + whole.output_tokens <= described.limit_tokens
    return Base(whole.take(fits), not real, int((~fits).sum()))


def course_of(cell: Cell, seed: int, folder: Path | None) -> Course:
    """Arrivals, fleet and bounds of a cell."""
    trace = load_traces()[cell.trace]
    workload = scaled(base_of(cell.trace, seed, folder).workload, cell.span_s, _rate_rps(trace, cell), seed)
    return Course(workload, fleet_of(trace, cell.engines), bounds_of(cell.trace, cell.level))


def fleet_of(trace: Trace, engines: int) -> Fleet:
    profile = trace.engine
    return [TwinEngine(f"e{number}", profile) for number in range(engines)]


def bounds_of(trace: str, level: str) -> SloTable:
    return slos_of(load_traces()[trace], load_statistics(trace), level)


def run_job(job: Job, kept: Path | None = None) -> Sequence[Outcome]:
    """The outcome of each policy, taken from the folder `kept` if it is there."""
    warm_up()
    course = course_of(job.cell, job.seed, job.folder)
    file = None if kept is None else kept / _kept_name(job, course)
    return kept_or(file, lambda: _outcomes(job, course))


def _outcomes(job: Job, course: Course) -> Sequence[Outcome]:
    if TRIMTAB in job.policies:
        return [run_trimtab(course.workload, course.fleet, course.slos, time.process_time)]
    return fixed_outcomes(course, grid_of(job, course), job.policies)


def grid_of(job: Job, course: Course) -> Grid:
    """All fixed plans, best first; of a fleet beyond `SCREENED`, those of a like smaller one, times their ratio."""
    times = max(1, job.cell.engines // SCREENED)
    if times > 1:
        course = course_of(replace(job.cell, engines=job.cell.engines // times), job.seed, job.folder)
    grid = screen(pieces(course.workload), course.fleet, course.slos)
    return Grid(_times(grid.plain, times), _times(grid.all, times))


def pieces(workload: Workload) -> list[Workload]:
    """One after the other."""
    starts_s = np.arange(0.0, workload.span_s, PIECE_S)
    return [workload.since(start_s).until(PIECE_S) for start_s in starts_s]


def _times(ranked: Sequence[Scored], factor: int) -> list[Scored]:
    names = ("prefill_engines", "decode_engines", "mixed_engines")
    grown = [{name: factor * getattr(each.candidate, name) for name in names} for each in ranked]
    return [
        replace(each, candidate=replace(each.candidate, **counts)) for each, counts in zip(ranked, grown, strict=True)
    ]


def _rate_rps(trace: Trace, cell: Cell) -> float:
    return trace.rates_rps[cell.level] * cell.engines


def _kept_name(job: Job, course: Course) -> str:
    asked = [digest(course.workload), course.slos.model_dump(mode="json"), course.fleet, sorted(job.policies)]
    return kept_name(job.cell.name, asked, (*WORLD, *TUNER) if TRIMTAB in job.policies else (*WORLD, *SCREENING))


def digest(workload: Workload) -> str:
    """Another one for other requests."""
    told = hashlib.sha256()
    for field in fields(workload):
        value = getattr(workload, field.name)
        told.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return told.hexdigest()
