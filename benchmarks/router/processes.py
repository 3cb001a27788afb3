"""Starting and ending the processes of a run, each on its core."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from benchmarks.machine import family, pinned
from benchmarks.router.targets import Place, Target

READY_S = 30.0
STOP_S = 5.0
SETTLE_S = 0.5
LAST_WORDS_BYTES = 300

# Gateways look a model's tokenizer up on a public hub; a closed port of this machine keeps them from it.
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}


class NotStarted(Exception):
    """A process did not come up; the message says why."""


class BackendDied(Exception):
    """The backend ended while it was needed: nothing that was measured since then means anything."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The running backend: its ports, its process and its log."""

    ports: Sequence[int]
    process: asyncio.subprocess.Process
    log: Path

    def check(self) -> None:
        """Raises `BackendDied`, with its last words, if it has ended."""
        if self.process.returncode is not None:
            raise BackendDied(f"the backend ended with code {self.process.returncode}: {_last_words(self.log)}")


@dataclass(frozen=True, slots=True)
class Running:
    """A target that is ready: its port and its processes (none for a direct connection)."""

    target: Target
    port: int
    processes: Sequence[psutil.Process]


@asynccontextmanager
async def spawned(
    command: Sequence[str],
    core: int | None,
    log: Path,
    environment: Mapping[str, str] | None = None,
    piped: bool = False,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process while the block runs, on its core; afterwards it and all its children are gone."""
    with log.open("wb") as sink, pinned(core):
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else sink,
            stderr=sink,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        everyone = family(process.pid)
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
        for survivor in everyone:
            with suppress(psutil.NoSuchProcess):
                survivor.kill()
    await process.wait()


@asynccontextmanager
async def backend(ports: int, core: int | None, folder: Path) -> AsyncIterator[Behind]:
    """The backend while the block runs. Raises `NotStarted`."""
    log = folder / "backend.log"
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.router.backend", "--ports", str(ports)]
    async with spawned(command, core, log, piped=True) as process:
        first = await _lines(process).readline()
        if not first:
            raise NotStarted(f"the backend ended at once: {_last_words(log)}")
        yield Behind(msgspec.json.decode(first)["ports"], process, log)


@asynccontextmanager
async def running(target: Target, place: Place, core: int | None) -> AsyncIterator[Running]:
    """The target, ready to be asked. Raises `NotStarted`."""
    command = target.command(place)
    if not command:
        yield Running(target, int(place.engines[0].rpartition(":")[2]), [])
        return
    log = place.folder / "log"
    async with spawned(command, core, log, {**NO_HUB, **target.environment(place)}) as process:
        await _until_ready(process, f"http://127.0.0.1:{place.port}{target.ready_path}", log)
        await asyncio.sleep(SETTLE_S)
        yield Running(target, place.port, family(process.pid))


async def _until_ready(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    deadline_s = asyncio.get_running_loop().time() + READY_S
    async with httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
        while asyncio.get_running_loop().time() < deadline_s:
            if process.returncode is not None:
                raise NotStarted(f"ended with code {process.returncode} before it was ready: {_last_words(log)}")
            with suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise NotStarted(f"not ready at {url} after {READY_S:g} s: {_last_words(log)}")


async def load_events(command: Sequence[str], core: int | None, log: Path) -> AsyncGenerator[dict[str, Any], None]:
    """What the load says, line by line, until it ends. Raises `NotStarted` if it fails."""
    async with spawned(command, core, log, piped=True) as process:
        async for line in _lines(process):
            yield msgspec.json.decode(line)
        if await process.wait() != 0:
            raise NotStarted(f"the load failed: {_last_words(log)}")


def _lines(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    if process.stdout is None:
        raise ValueError("the process was started without a pipe")
    return process.stdout


def _last_words(log: Path) -> str:
    text = log.read_text(errors="replace").strip()
    return " ".join(text[-LAST_WORDS_BYTES:].split()) or "(it said nothing)"
