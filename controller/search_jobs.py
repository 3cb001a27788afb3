"""What the search worker is asked to do. Light to import: the heavy imports happen where the jobs run."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.plan import Plan
from tuner.slo import SloTable
from tuner.twin.types import Forecast
from tuner.types import EngineState, SearchResult
from tuner.workload import Workload

if TYPE_CHECKING:
    from tuner.task import SearchTask


def prepare() -> None:
    """Import what searches need and compile the twin."""
    import tuner.search  # noqa: F401 — Optuna takes a second to import
    from tuner.twin.fast import warm_up

    warm_up()


def search(task: "SearchTask") -> SearchResult:
    """The search of one tick."""
    from tuner.search import search as run

    return run(task, time.process_time)


def what_if(
    workload: Workload, engines: Sequence[EngineState], slos: SloTable, plans: Sequence[Plan]
) -> list[Forecast]:
    """What each plan would have made of the workload."""
    from tuner.search import what_if as run

    return run(workload, engines, slos, plans)
