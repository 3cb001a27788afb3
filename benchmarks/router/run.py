"""Runs the targets side by side: all are up, one at a time is measured, and rounds are interleaved.

The proxies share one core, of which only the measured one uses any; backend, load and Redis are on another. Ratios are
taken within a round and scenario, where the machine was the same for all, and the median of the rounds is reported.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import Cores, CpuTime, available_cores, busy_s, cpu_time, describe, pinned
from benchmarks.report import Report
from benchmarks.router.load import Measured
from benchmarks.router.processes import Behind, NotStarted, Running, backend, load_events, running
from benchmarks.router.scenarios import SCENARIOS, Scenario
from benchmarks.router.summary import Sample, report
from benchmarks.router.targets import DIRECT, TARGETS, Place, Target
from controller.stack.embedded import embedded_redis, free_port

ENGINES = 2
WARM_UP_S = 0.3
CALM_S = 0.2
CALM_SHARE = 0.1
CALM_TRIES = 25


@dataclass(frozen=True, slots=True)
class RouterOptions:
    targets: Sequence[str]
    scenarios: Sequence[str]
    rounds: int
    window_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Bench:
    """What a measurement needs besides its target."""

    options: RouterOptions
    cores: Cores
    backend: Behind
    folder: Path


async def run_router(options: RouterOptions) -> Report:
    """Start what can be started, measure it, end it, and say how it went. Raises `BackendDied`."""
    cores = Cores.share(available_cores())
    machine = {**describe(), "proxy on core": str(cores.proxy), "load and backend on": f"{cores.load}, {cores.backend}"}
    # This process, too, keeps away from the proxy's core.
    async with AsyncExitStack() as stack:
        stack.enter_context(pinned(cores.load))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-benchmark-")))
        behind = await stack.enter_async_context(backend(ENGINES, cores.backend, folder))
        up, skipped = await _start_all(
            stack, options, [f"http://127.0.0.1:{port}" for port in behind.ports], cores, folder
        )
        samples = await _all_rounds(Bench(options, cores, behind, folder), up)
    return report(samples, options.seed, machine, skipped)


async def _start_all(
    stack: AsyncExitStack, options: RouterOptions, engines: Sequence[str], cores: Cores, folder: Path
) -> tuple[list[Running], dict[str, str]]:
    up: list[Running] = []
    skipped: dict[str, str] = {}
    redis_url = await _redis(stack, options, cores)
    for name in options.targets:
        target = TARGETS[name]
        reason = target.missing()
        if reason is None:
            try:
                up.append(
                    await stack.enter_async_context(
                        running(target, _place(target, engines, folder, redis_url), cores.proxy)
                    )
                )
            except NotStarted as error:
                reason = str(error)
        if reason is not None:
            skipped[name] = reason
    return up, skipped


async def _redis(stack: AsyncExitStack, options: RouterOptions, cores: Cores) -> str | None:
    if not any(TARGETS[name].needs_redis for name in options.targets):
        return None
    with pinned(cores.backend):
        return (await stack.enter_async_context(embedded_redis())).url


def _place(target: Target, engines: Sequence[str], folder: Path, redis_url: str | None) -> Place:
    own = folder / target.name
    own.mkdir()
    return Place(free_port(), free_port(), engines, own, redis_url)


async def _all_rounds(bench: Bench, up: Sequence[Running]) -> list[Sample]:
    scenarios = [SCENARIOS[name] for name in bench.options.scenarios]
    samples = []
    with _progress() as progress:
        task = progress.add_task("", total=bench.options.rounds * len(scenarios) * len(up))
        for number in range(bench.options.rounds):
            for scenario in scenarios:
                # Another goes first in every round, so that none always follows the same neighbour.
                for one in _rotated(up, number):
                    progress.update(task, description=f"round {number + 1}: {scenario.title}, {one.target.name}")
                    progress.refresh()
                    samples.append(await _sample(bench, one, scenario, number))
                    await _calm(one)
                    progress.advance(task)
        progress.refresh()
    return samples


async def _calm(one: Running) -> None:
    """Wait until a target has dealt with what its clients left behind, which would take CPU from the next one."""
    for _ in range(CALM_TRIES):
        before = cpu_time(one.processes)
        await asyncio.sleep(CALM_S)
        if (cpu_time(one.processes) - before).total_s < CALM_SHARE * CALM_S:
            return


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Drawn between measurements only: a redraw during one would take the load's core.
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def _rotated(up: Sequence[Running], by: int) -> list[Running]:
    by %= max(1, len(up))
    return [*up[by:], *up[:by]]


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU used so far: by the proxy, the backend and the whole machine."""

    proxy: CpuTime
    backend: CpuTime
    machine_s: float


async def _sample(bench: Bench, one: Running, scenario: Scenario, number: int) -> Sample:
    readings: list[Reading] = []
    measured: Measured | None = None
    failure: str | None = None
    try:
        events = load_events(_load_command(bench, one, scenario), bench.cores.load, bench.folder / "load.log")
        async with aclosing(events):
            async for event in events:
                if event["event"] == "result":
                    measured = msgspec.convert(event["measured"], Measured)
                else:
                    readings.append(_read(bench, one))
    except NotStarted as error:
        failure = str(error)
    except psutil.NoSuchProcess as error:
        failure = f"a process of it ended while it was measured: {error.pid}"
    bench.backend.check()
    if failure is not None or measured is None:
        return Sample.failed(one.target.name, scenario.name, number, failure or "the load gave no result")
    return _with_cpu(one, scenario, number, measured, readings)


def _read(bench: Bench, one: Running) -> Reading:
    return Reading(cpu_time(one.processes), cpu_time([psutil.Process(bench.backend.process.pid)]), busy_s())


def _with_cpu(one: Running, scenario: Scenario, number: int, measured: Measured, readings: Sequence[Reading]) -> Sample:
    first, last = readings
    proxy, behind, machine_s = last.proxy - first.proxy, last.backend - first.backend, last.machine_s - first.machine_s
    units = measured.chunks if scenario.stream else measured.requests
    used = proxy if units and one.target.name != DIRECT else None
    own_s = proxy.total_s + behind.total_s + measured.cpu_share * measured.window_s
    return Sample(
        target=one.target.name,
        scenario=scenario.name,
        round=number,
        user_us=used.user_s * 1e6 / units if used else None,
        system_us=used.system_s * 1e6 / units if used else None,
        proxy_share=proxy.total_s / measured.window_s,
        backend_share=behind.total_s / measured.window_s,
        elsewhere_share=max(0.0, machine_s - own_s) / measured.window_s,
        measured=measured,
    )


def _load_command(bench: Bench, one: Running, scenario: Scenario) -> list[str]:
    options = bench.options
    command = [sys.executable, "-m", "benchmarks.router.load", scenario.name, "--port", str(one.port)]
    command += ["--window-s", str(options.window_s), "--warm-up-s", str(WARM_UP_S), "--seed", str(options.seed)]
    return command if one.target.takes_ids else [*command, "--no-ids"]
