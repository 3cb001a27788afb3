"""Heavy work in a process of its own: searches and forecasts take seconds of a core, and the API must not feel it.

Run as `python -m controller.search_worker` it is that process: jobs come in by stdin, answers go out by stdout, each
pickled behind its length. Both ends belong to one controller, so nobody else can send a pickle.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

import structlog

from controller.stack import tether

LENGTH = struct.Struct("!Q")
WARM_UP_S = 300.0
"""Compiling the twin may take this long on a machine that is busy."""

P = ParamSpec("P")
Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class WorkerFailed(Exception):
    """A job brought no answer: it raised, took too long, or its process died. The next job gets a new process."""


class SearchWorker:
    """Runs jobs in one process, one at a time, starting it when needed; `aclose` ends it.

    `prepare` is run first in each new process. Jobs are functions of importable modules.
    """

    def __init__(self, prepare: Callable[[], object]) -> None:
        self._prepare = prepare
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process that waits for jobs or runs one; `None` while there is none."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def warm_up(self) -> None:
        """Have a process ready before the first job. Failing is for the first job to report."""
        try:
            async with self._turn:
                await self._ready()
        except WorkerFailed as error:
            log.warning("the search worker did not warm up", error=str(error))

    async def run(self, limit_s: float, job: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """`job(*args, **kwargs)`, which may take `limit_s` once it is its turn; raises `WorkerFailed`."""
        async with self._turn:
            process = await self._ready()
            return await self._ask(process, limit_s, job, args, kwargs)  # type: ignore[return-value]

    async def aclose(self) -> None:
        """End the process, whatever it does. Calling it twice is fine."""
        process = self._process
        if process is None:
            return
        if self._turn.locked():
            # Whoever waits for an answer hears that the process died, and clears up.
            _kill(process)
            await process.wait()
        else:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the process and close its pipes. Nobody may be reading from it."""
        self._process = None
        _kill(process)
        await process.communicate()

    async def _ready(self) -> asyncio.subprocess.Process:
        """The process, new and prepared if the last one is gone."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._process is not None:
            await self._end(self._process)
        try:
            process = self._process = await _spawn()
        except OSError as error:  # no memory or no process to be had
            raise WorkerFailed(f"no search worker could be started: {error}") from error
        began_s = time.monotonic()
        await self._ask(process, WARM_UP_S, self._prepare, (), {})
        log.info("search worker is ready", pid=process.pid, seconds=round(time.monotonic() - began_s, 1))
        return process

    async def _ask(
        self,
        process: asyncio.subprocess.Process,
        limit_s: float,
        job: Callable[..., object],
        args: Sequence[object],
        kwargs: object,
    ) -> object:
        name = getattr(job, "__name__", str(job))
        try:
            async with asyncio.timeout(limit_s):
                succeeded, answer = await _exchange(process, (job, args, kwargs))
        except (OSError, asyncio.IncompleteReadError) as error:  # a time-out is an OSError
            await self._end(process)
            how = f"took longer than {limit_s:g} s" if isinstance(error, TimeoutError) else "died"
            raise WorkerFailed(f"the search worker {how} in {name}") from error
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next job.
            await self._end(process)
            raise
        if not succeeded:
            raise WorkerFailed(f"{name} failed in the search worker: {answer}")
        return answer


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _spawn() -> asyncio.subprocess.Process:
    held = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]
    root = str(Path(__file__).parents[1])
    return await asyncio.create_subprocess_exec(
        *held, sys.executable, "-m", __name__,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        start_new_session=True,
    )  # fmt: skip


async def _exchange(process: asyncio.subprocess.Process, message: object) -> tuple[bool, object]:
    if process.stdin is None or process.stdout is None:
        raise OSError("the search worker has no pipes")
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    process.stdin.write(LENGTH.pack(len(packed)) + packed)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    answer: tuple[bool, object] = pickle.loads(await process.stdout.readexactly(length))  # noqa: S301 — our own child
    return answer


# The process


def main() -> None:
    """Answer jobs until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not end up between answers.
    os.dup2(2, 1)
    with jobs, answers:
        while (packed := _next(jobs)) is not None:
            answer = pickle.dumps(_do(packed), pickle.HIGHEST_PROTOCOL)
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()


def _next(jobs: BinaryIO) -> bytes | None:
    header = jobs.read(LENGTH.size)
    return jobs.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _do(packed: bytes) -> tuple[bool, object]:
    try:
        job, args, kwargs = pickle.loads(packed)  # noqa: S301 — from the controller that started this process
        return True, job(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 — whatever it is, it belongs to the one who sent the job
        return False, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
