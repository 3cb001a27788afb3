"""Child processes: started, watched, started again when they die, and ended in reverse order."""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from controller.stack import tether

READY_S = 60.0
POLL_S = 0.05
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A child that lived this long is started again without a longer delay."""
LOG_TAIL_LINES = 12

Say = Callable[[str], None]
"""Prints one line for the operator."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run one child. Its program writes JSON with its `url` to the ready file once it serves."""

    name: str
    arguments: Callable[[int, Path], Sequence[str]]
    """Arguments to this Python, from a port (0: any free one) and the ready file."""
    port: int | None = 0
    """Port to ask for at first; later starts ask for the port that the first one got. `None`: it serves nothing."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additions to the environment; secrets go here, because arguments are visible to every user of the machine."""
    stop_s: float = 5.0
    """How long it may take to end after SIGTERM."""
    ready_s: float = READY_S
    """How long it may take until it serves."""


class DiedAtStart(Exception):
    """A child ended, or hung, before it was ready. The message ends with the tail of its log."""


class Child:
    """One child process. `start` and `stop` may be called again and again."""

    def __init__(self, spec: ChildSpec, folder: Path) -> None:
        self.spec = spec
        self.url: str | None = None
        self.log_path = folder / f"{spec.name}.log"
        self._ready_file = folder / f"{spec.name}.ready"
        self._port = spec.port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns once the child serves; raises `DiedAtStart`, and then nothing of it runs any more."""
        self._ready_file.unlink(missing_ok=True)
        self._process = await self._spawn()
        try:
            if self._port is not None:
                async with asyncio.timeout(self.spec.ready_s):
                    await self._until_ready(self._process)
        except TimeoutError as error:
            await self.stop()
            raise DiedAtStart(
                f"{self.spec.name} was not ready after {self.spec.ready_s:g} s. {self.log_tail()}"
            ) from error

    async def ended(self) -> int:
        """Wait for the end of the process; its exit code (negative: the signal that ended it)."""
        return 0 if self._process is None else await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after `stop_s`. Fine if it does not run."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """SIGKILL. Fine if it does not run."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def log_tail(self) -> str:
        """The last lines of its log, as a sentence."""
        with contextlib.suppress(OSError), self.log_path.open(errors="replace") as lines:
            tail = "".join(deque(lines, LOG_TAIL_LINES)).rstrip()
            return f"The end of {self.log_path}:\n{tail}" if tail else f"Its log {self.log_path} is empty."
        return f"It has no log at {self.log_path}."

    async def _spawn(self) -> asyncio.subprocess.Process:
        held = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), sys.executable]
        arguments = self.spec.arguments(self._port or 0, self._ready_file)
        with self.log_path.open("ab") as log:
            # A session of its own keeps a terminal's Ctrl-C away from it: the order of ending is decided here.
            return await asyncio.create_subprocess_exec(
                *held, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **self.spec.env}, start_new_session=True,
            )  # fmt: skip

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        while (url := self._ready_url()) is None:
            if process.returncode is not None:
                raise DiedAtStart(f"{self.spec.name} ended with {_how(process.returncode)}. {self.log_tail()}")
            await asyncio.sleep(POLL_S)
        self.url = url
        self._port = urlsplit(url).port

    def _ready_url(self) -> str | None:
        try:
            return msgspec.json.decode(self._ready_file.read_bytes(), type=_Ready).url
        except (FileNotFoundError, msgspec.DecodeError):
            return None


class _Ready(msgspec.Struct):
    url: str


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


class Supervisor:
    """Starts children, starts them again when they die, and ends them in reverse order.

    `async with supervisor:` owns them: when the block is left, for whatever reason, none is left either.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        self._groups: list[Sequence[Child]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self.deaths = 0
        """How often a child ended that should not have."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for group in reversed(self._groups):
            await asyncio.gather(*(child.stop() for child in group))

    async def start(self, *specs: ChildSpec) -> Sequence[Child]:
        """Start children side by side and return once all serve; raises `DiedAtStart` for the first that fails."""
        children = [Child(spec, self._folder) for spec in specs]
        self._groups.append(children)
        await _all(child.start() for child in children)
        self._watchers += [asyncio.create_task(self._keep_alive(child)) for child in children]
        return children

    def kill_all(self) -> None:
        """End everything at once: for an operator who does not want to wait."""
        for group in self._groups:
            for child in group:
                child.kill()

    async def _keep_alive(self, child: Child) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            started_s = time.monotonic()
            code = await child.ended()
            self.deaths += 1
            delay_s = FIRST_DELAY_S if time.monotonic() - started_s > STEADY_S else delay_s
            self._say(f"{child.spec.name} ended with {_how(code)}; starting it again in {delay_s:g} s.")
            self._say(child.log_tail())
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            await self._start_again(child)

    async def _start_again(self, child: Child) -> None:
        try:
            await child.start()
        except DiedAtStart:
            return  # the loop reports it, as it does every death
        self._say(f"{child.spec.name} serves again at {child.url}.")


async def _all(starts: Iterable[Coroutine[None, None, None]]) -> None:
    """Wait for all, or for the first failure, which is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
