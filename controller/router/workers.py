"""Several router processes on one port: the kernel spreads connections over them."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import structlog

from controller.settings import RouterSettings

log = structlog.get_logger()

MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
RESTART_AFTER_S = 1.0
KILL_AFTER_S = 5.0


def run_workers(settings: RouterSettings, run_one: Callable[[RouterSettings], int]) -> int:
    """Run `settings.workers` processes until SIGTERM or SIGINT; one that dies is started again."""
    with tempfile.TemporaryDirectory(prefix="trimtab-metrics-") as directory, _reserved_port(settings) as port:
        os.environ[MULTIPROCESS_DIR] = directory
        fixed = settings.model_copy(update={"port": port})
        return _Supervisor(fixed, run_one, Path(directory)).run()


class _Supervisor:
    def __init__(self, settings: RouterSettings, run_one: Callable[[RouterSettings], int], metrics_dir: Path) -> None:
        self._settings = settings
        self._run_one = run_one
        self._metrics_dir = metrics_dir
        self._context = multiprocessing.get_context("spawn")
        self._stopping = False

    def run(self) -> int:
        for sign in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sign, self._stop)
        workers = [self._start(index) for index in range(self._settings.workers)]
        try:
            while not self._stopping:
                time.sleep(0.1)
                workers = [self._revived(index, worker) for index, worker in enumerate(workers)]
        finally:
            self._end(workers)
        return 0

    def _start(self, index: int) -> multiprocessing.process.BaseProcess:
        own = {"router_id": f"{self._settings.router_id}-w{index}"}
        if index > 0:
            own["ready_file"] = None  # type: ignore[assignment]
        worker = self._context.Process(target=self._run_one, args=(self._settings.model_copy(update=own),))
        worker.start()
        return worker

    def _revived(self, index: int, worker: multiprocessing.process.BaseProcess) -> multiprocessing.process.BaseProcess:
        if worker.is_alive() or self._stopping:
            return worker
        log.error("worker_died", worker=index, exit_code=worker.exitcode)
        time.sleep(RESTART_AFTER_S)
        return self._start(index)

    def _end(self, workers: list[multiprocessing.process.BaseProcess]) -> None:
        for worker in workers:
            worker.terminate()
        deadline_s = time.monotonic() + self._settings.drain_s + KILL_AFTER_S
        for worker in workers:
            worker.join(max(0.0, deadline_s - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _stop(self, _sign: int, _frame: FrameType | None) -> None:
        self._stopping = True


@contextmanager
def _reserved_port(settings: RouterSettings) -> Iterator[int]:
    """Hold the port, without listening, so that all workers bind the same one even if it was to be a free one."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((settings.host, settings.port))
        yield int(holder.getsockname()[1])
