"""The machine under a benchmark: what it is, which core runs what, and how much CPU somebody used."""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. `None`: not pinned, because the machine has too few cores to keep them apart."""

    proxy: int | None
    backend: int | None
    load: int | None

    @classmethod
    def share(cls, available: Sequence[int]) -> "Cores":
        """The proxy has a core to itself; backend and load share one unless there is a third."""
        if len(available) < 2:
            return cls(None, None, None)
        return cls(available[0], available[1], available[min(2, len(available) - 1)])


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of CPU that some processes have used so far."""

    user_s: float
    system_s: float

    def __sub__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(self.user_s - other.user_s, self.system_s - other.system_s)

    @property
    def total_s(self) -> float:
        return self.user_s + self.system_s


def cpu_time(processes: Sequence[psutil.Process]) -> CpuTime:
    """Sum over the processes, each of which must still run (`psutil.NoSuchProcess` otherwise)."""
    times = [process.cpu_times() for process in processes]
    return CpuTime(sum(each.user for each in times), sum(each.system for each in times))


def busy_s() -> float:
    """Seconds of CPU used on the whole machine since it booted, by its host too; all cores together."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Children started inside inherit the core; the caller has its own cores back afterwards."""
    before = os.sched_getaffinity(0)
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe() -> dict[str, str]:
    return {
        "cpu": _cpu_model(),
        "cores": str(len(available_cores())),
        "kernel": platform.release(),
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions by distribution name; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
