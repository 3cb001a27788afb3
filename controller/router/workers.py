"""Several router processes on one port: the kernel spreads connections over them."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import structlog
from prometheus_client.multiprocess import mark_process_dead

from controller.settings import RouterSettings
from engines.parent import die_with

log = structlog.get_logger()

MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
RESTART_AFTER_S = 1.0
KILL_AFTER_S = 5.0

RunOne = Callable[[RouterSettings], int]
Process = multiprocessing.process.BaseProcess


def run_workers(settings: RouterSettings, run_one: RunOne) -> int:
    """Run `settings.workers` processes until SIGTERM or SIGINT; one that dies is started again.

    Raises `ChildProcessError` if one dies without ever having served: then its settings are wrong and no new attempt
    will help.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-workers-") as directory, _reserved_port(settings) as port:
        os.environ[MULTIPROCESS_DIR] = directory
        fixed = settings.model_copy(update={"port": port})
        return _Supervisor(fixed, run_one, Path(directory)).run()


def announce(ready_file: Path, url: str, router_id: str) -> None:
    """Say where this process serves, at once or not at all: nobody reads half of it."""
    partial = ready_file.with_name(ready_file.name + ".partial")
    partial.write_text(json.dumps({"url": url, "router_id": router_id, "pid": os.getpid()}))
    partial.replace(ready_file)


class _Supervisor:
    """`folder` holds what the workers leave for each other: their metrics, and a file from each that has served."""

    def __init__(self, settings: RouterSettings, run_one: RunOne, folder: Path) -> None:
        self._settings = settings
        self._run_one = run_one
        self._folder = folder
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[Process] = []
        self._announced = False
        self._stopping = False

    def run(self) -> int:
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._stop)
        try:
            for index in range(self._settings.workers):
                self._workers.append(self._start(index))
            while not self._stopping:
                time.sleep(0.1)
                self._revive()
                self._announce()
        finally:
            self._end()
        return 0

    def _start(self, index: int) -> Process:
        own = {"router_id": f"{self._settings.router_id}-w{index}", "ready_file": self._ready_file(index)}
        settings = self._settings.model_copy(update=own)
        worker = self._context.Process(target=_work, args=(self._run_one, settings, os.getpid()))
        worker.start()
        return worker

    def _ready_file(self, index: int) -> Path:
        return self._folder / f"worker-{index}.ready"

    def _revive(self) -> None:
        for index, worker in enumerate(self._workers):
            if not worker.is_alive() and not self._stopping:
                self._bury(index, worker)
                time.sleep(RESTART_AFTER_S)
                self._workers[index] = self._start(index)

    def _bury(self, index: int, worker: Process) -> None:
        log.error("worker_died", worker=index, exit_code=worker.exitcode)
        # What it counted stays, so that sums never fall; what it had in hand is gone.
        mark_process_dead(worker.pid, str(self._folder))  # type: ignore[no-untyped-call]
        if not self._ready_file(index).exists():
            raise ChildProcessError(f"worker {index} ended with code {worker.exitcode} before it served; see its error")

    def _announce(self) -> None:
        """Once all workers serve, say so in their place: whoever reads the pid wants to signal all of them."""
        if self._announced or not all(self._ready_file(index).exists() for index in range(len(self._workers))):
            return
        self._announced = True
        if self._settings.ready_file is not None:
            url = json.loads(self._ready_file(0).read_text())["url"]
            announce(self._settings.ready_file, url, self._settings.router_id)

    def _end(self) -> None:
        for worker in self._workers:
            worker.terminate()
        deadline_s = time.monotonic() + self._settings.drain_s + KILL_AFTER_S
        for worker in self._workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _stop(self, _sign: int, _frame: FrameType | None) -> None:
        self._stopping = True


def _work(run_one: RunOne, settings: RouterSettings, parent_pid: int) -> None:
    """What a worker process does."""
    die_with(parent_pid)
    sys.exit(run_one(settings))


@contextmanager
def _reserved_port(settings: RouterSettings) -> Iterator[int]:
    """Hold the port, without listening, so that all workers bind the same one even if it was to be a free one."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((settings.host, settings.port))
        yield int(holder.getsockname()[1])
