"""A `trimtab up` in a process of its own, and what it leaves behind."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from redis import Redis

from controller.stack.running import RunningStack, find_running
from controller.store import Keys
from engines.records import RequestRecord

START_S = 90.0
STOP_S = 30.0
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS")
"""What a `make test` around the tests would tell another `make`."""


def environment_of(folder: Path) -> Mapping[str, str]:
    """No stack and no setting of whoever runs the tests; state and logs of the stack go to `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIMTAB_")}
    kept = {name: value for name, value in kept.items() if name not in OF_MAKE}
    return kept | {"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder), "COLUMNS": "200"}


class Up:
    """A `trimtab up` that serves."""

    def __init__(self, process: subprocess.Popen[str], stack: RunningStack, output: Path) -> None:
        self.process = process
        self.stack = stack
        self._output = output
        self.children = children_of(process.pid)

    def output(self) -> str:
        return self._output.read_text()

    def ports(self) -> list[int]:
        urls = (self.stack.url, self.stack.admin_url, self.stack.redis_url)
        return [port for url in urls if (port := urlsplit(url).port) is not None]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=STOP_S)

    def nothing_is_left(self) -> bool:
        return not any(runs(pid) for pid in self.children) and not any(listens(port) for port in self.ports())


def end_hard(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_announced(
    process: subprocess.Popen[str], folder: Path, output: Path, within_s: float = START_S
) -> RunningStack:
    """The stack once `up` has printed that it is up."""
    give_up_s = time.monotonic() + within_s
    while "Trimtab is up" not in output.read_text():
        if process.poll() is not None or time.monotonic() > give_up_s:
            pytest.fail(f"trimtab up did not start:\n{output.read_text()}")
        time.sleep(0.1)
    (stack,) = find_running(folder)
    return stack


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(happened: Callable[[], bool], what: str, limit_s: float = STOP_S) -> None:
    give_up_s = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > give_up_s:
            pytest.fail(f"not within {limit_s:g} s: {what}")
        time.sleep(0.1)


def records(stack: RunningStack) -> list[RequestRecord]:
    with Redis.from_url(stack.redis_url) as client:
        entries = client.xrange(Keys(stack.model).requests)
    return [msgspec.json.decode(next(iter(fields.values())), type=RequestRecord) for _, fields in entries]
