"""Several router processes on one port, as a real process tree."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

LIVENESS_S = 40.0
Start = Callable[..., subprocess.Popen[bytes]]


def until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIVENESS_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came to be"
        time.sleep(0.05)


def workers_of(pid: int) -> set[int]:
    """Router processes below `pid`; multiprocessing keeps a helper of its own there too."""
    children = psutil.Process(pid).children()
    return {child.pid for child in children if "spawn_main" in " ".join(_command(child))}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class Router:
    process: subprocess.Popen[bytes]
    ready: dict[str, object]

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def workers(self) -> set[int]:
        return workers_of(self.process.pid)

    def metric(self, name: str) -> float:
        """Asked over a new connection, so that the kernel may choose either worker."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        return sum(each.value for each in samples if each.name == name)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []
    said = (tmp_path / "said").open("wb")  # not a pipe: nobody would read it, and orphans would hold it open

    def start(*flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "controller.cli", "router", "--model", "m", "--engine", "http://127.0.0.1:1"]
        process = subprocess.Popen(
            [*command, "--port", "0", "--workers", "2", "--ready-file", str(tmp_path / "ready.json"), *flags],
            stderr=said,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        left = workers_of(process.pid) if process.poll() is None else set()
        process.kill()
        process.wait()
        _kill(left)
    said.close()


@pytest.fixture
def router(start: Start, tmp_path: Path) -> Router:
    process, ready_file = start("--drain-s", "5"), tmp_path / "ready.json"
    until(lambda: ready_file.exists() or process.poll() is not None)
    return Router(process, json.loads(ready_file.read_text()))


def connections_by_worker(router: Router) -> dict[int, int]:
    port = httpx.URL(router.url).port
    return {
        pid: sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in connections)
        for pid in router.workers
        for connections in [psutil.Process(pid).net_connections("tcp")]
    }


def test_all_workers_serve_one_port_and_each_tells_the_sums_of_all(router: Router) -> None:
    assert router.ready["pid"] == router.process.pid
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            client = stack.enter_context(httpx.Client(base_url=router.url))
            assert client.get("/health").status_code == 200
        shares = connections_by_worker(router)
        assert (len(shares), sum(shares.values())) == (2, 24)
        assert min(shares.values()) > 0
        # The connection of the scrape itself may count too.
        for _ in range(6):
            until(lambda: router.metric("trimtab_client_connections") in (24, 25))
    until(lambda: router.metric("trimtab_client_connections") <= 1)
    for _ in range(10):
        httpx.post(f"{router.url}/v1/completions", content=b"no JSON")
    for _ in range(6):
        assert router.metric("trimtab_requests_total") == 10


def test_a_worker_that_is_killed_comes_back_and_leaves_no_ghost_in_the_sums(router: Router) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            stack.enter_context(httpx.Client(base_url=router.url)).get("/health")
        until(lambda: router.metric("trimtab_client_connections") >= 24)
        for _ in range(10):
            httpx.post(f"{router.url}/v1/completions", content=b"no JSON")
        shares = connections_by_worker(router)
        victim, survivor = shares
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(router.workers - {victim}) == 2)
        until(lambda: router.metric("trimtab_client_connections") in (shares[survivor], shares[survivor] + 1))
        assert router.metric("trimtab_requests_total") == 10
    until(lambda: httpx.get(f"{router.url}/health").status_code == 200)
    assert router.process.poll() is None


def test_sigterm_ends_all_of_them(router: Router) -> None:
    workers = router.workers
    router.process.terminate()
    assert router.process.wait(LIVENESS_S) == 0
    assert not any(map(lives, workers))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_workers_die_with_a_parent_that_is_killed(router: Router) -> None:
    workers = router.workers
    assert len(workers) == 2
    router.process.kill()
    try:
        until(lambda: not any(map(lives, workers)))
    finally:
        _kill(workers)


def test_settings_with_which_no_worker_can_serve_end_the_whole_with_the_reason(start: Start, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    process = start("--tokenizer", missing)
    assert process.wait(LIVENESS_S) == 1
    said = (tmp_path / "said").read_text()
    assert missing in said
    assert "before it served" in said
