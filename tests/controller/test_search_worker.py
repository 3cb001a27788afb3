"""The process that searches run in: what comes back, what happens when it dies or is stuck, and that none is left."""

import asyncio
import operator
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controller.search_worker import SearchWorker, WorkerFailed

LIVENESS_S = 30.0


@pytest.fixture
async def worker() -> AsyncIterator[SearchWorker]:
    made = SearchWorker(prepare=os.getpid)
    yield made
    await made.aclose()


def runs(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_job_runs_in_another_process_that_the_next_job_finds_again(worker: SearchWorker) -> None:
    pids = [await worker.run(LIVENESS_S, os.getpid) for _ in range(3)]
    assert set(pids) == {worker.pid}
    assert os.getpid() not in pids


async def test_answers_are_those_of_the_jobs_that_were_asked(worker: SearchWorker) -> None:
    answers = await asyncio.gather(*(worker.run(LIVENESS_S, operator.mul, number, 2) for number in range(10)))
    assert answers == [2 * number for number in range(10)]


async def test_a_machine_that_gives_no_process_fails_the_job_and_not_the_controller(
    worker: SearchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", refused)
        await worker.warm_up()
        with pytest.raises(WorkerFailed, match="no more processes"):
            await worker.run(LIVENESS_S, os.getpid)
    assert await worker.run(LIVENESS_S, os.getpid) == worker.pid


async def test_megabytes_go_both_ways(worker: SearchWorker) -> None:
    assert await worker.run(LIVENESS_S, operator.mul, b"x" * 1_000_000, 3) == b"x" * 3_000_000


async def test_the_loop_goes_on_while_a_job_runs(worker: SearchWorker) -> None:
    await worker.warm_up()
    job = asyncio.create_task(worker.run(LIVENESS_S, time.sleep, 0.3))
    turns = 0
    while not job.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 5


async def test_a_job_that_raises_says_what_and_leaves_the_process_as_it_is(worker: SearchWorker) -> None:
    before = await worker.run(LIVENESS_S, os.getpid)
    with pytest.raises(WorkerFailed, match=r"truediv failed.*ZeroDivisionError"):
        await worker.run(LIVENESS_S, operator.truediv, 1, 0)
    assert await worker.run(LIVENESS_S, os.getpid) == before


async def test_what_a_job_prints_does_not_end_up_in_its_answer(worker: SearchWorker) -> None:
    assert await worker.run(LIVENESS_S, print, "hello") is None
    assert await worker.run(LIVENESS_S, operator.add, 1, 1) == 2


async def test_a_process_that_dies_is_replaced(worker: SearchWorker) -> None:
    before = await worker.run(LIVENESS_S, os.getpid)
    with pytest.raises(WorkerFailed, match=r"died in abort"):
        await worker.run(LIVENESS_S, os.abort)
    after = await worker.run(LIVENESS_S, os.getpid)
    assert after not in (before, os.getpid())


async def test_a_process_that_was_killed_between_jobs_is_replaced(worker: SearchWorker) -> None:
    before = await worker.run(LIVENESS_S, os.getpid)
    os.kill(before, 9)
    while worker.pid is not None:
        await asyncio.sleep(0.01)
    assert await worker.run(LIVENESS_S, os.getpid) != before


async def test_a_job_that_is_stuck_is_ended_with_its_process(worker: SearchWorker) -> None:
    stuck = await worker.run(LIVENESS_S, os.getpid)
    with pytest.raises(WorkerFailed, match=r"longer than 0.2 s in sleep"):
        await worker.run(0.2, time.sleep, 3600)
    assert not runs(stuck)
    assert await worker.run(LIVENESS_S, operator.add, 1, 1) == 2


async def test_a_job_that_is_given_up_does_not_answer_the_next_one(worker: SearchWorker) -> None:
    await worker.warm_up()
    given_up = asyncio.create_task(worker.run(LIVENESS_S, time.sleep, 0.2))
    await asyncio.sleep(0.05)
    given_up.cancel()
    assert await worker.run(LIVENESS_S, operator.add, 1, 1) == 2
    await asyncio.wait([given_up])


async def test_closing_ends_a_job_under_way_and_leaves_no_process(worker: SearchWorker) -> None:
    pid = await worker.run(LIVENESS_S, os.getpid)
    job = asyncio.create_task(worker.run(LIVENESS_S, time.sleep, 3600))
    await asyncio.sleep(0.05)
    await worker.aclose()
    with pytest.raises(WorkerFailed):
        await job
    assert not runs(pid)
    await worker.aclose()


async def test_a_failed_preparation_is_told_to_the_first_job_and_not_to_the_warm_up() -> None:
    worker = SearchWorker(prepare=os.abort)
    await worker.warm_up()
    with pytest.raises(WorkerFailed, match="died in abort"):
        await worker.run(LIVENESS_S, os.getpid)
    await worker.aclose()
