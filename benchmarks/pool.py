"""Jobs in processes of their own, as many at a time as there are cores."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Protocol, TypeVar

from benchmarks.machine import available_cores
from benchmarks.progress import progress
from engines.parent import die_with


class Sized(Protocol):
    """What a job says of itself."""

    @property
    def title(self) -> str: ...

    @property
    def size(self) -> float:
        """About how long it takes beside others."""
        ...


Task = TypeVar("Task", bound=Sized)
Result = TypeVar("Result")


def side_by_side(jobs: Sequence[Task], work: Callable[[Task], Result]) -> Iterator[tuple[Task, Result]]:
    """Every job with its result, as they are done, the largest begun first. The first that fails ends it all.

    Jobs, results and `work` must be picklable.
    """
    # Fresh processes: forked ones would share what compiled code and thread pools hold.
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(available_cores()), len(jobs)))
    with progress() as bar, ProcessPoolExecutor(workers, context, die_with, (os.getpid(),)) as pool:
        task = bar.add_task("", total=len(jobs))
        largest_first = sorted(jobs, key=lambda job: -job.size)
        futures: dict[Future[Result], Task] = {pool.submit(work, job): job for job in largest_first}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
                bar.update(task, advance=1, description=f"done: {futures[future].title}")
        except BaseException:  # one job failed, or the caller stops: do not wait for jobs that nobody wants now
            pool.shutdown(wait=False, cancel_futures=True)
            raise
