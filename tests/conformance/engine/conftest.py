"""Engines under test, as real processes. A new kind of engine joins by an entry in `KINDS` and nothing else.

What only an engine with modelled time can be asked is marked `emulated`, with the reason.
"""

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.sglang import Pair

START_S = 60.0
REAL_BREVITY = 0.1
ANSWER_S = 60.0
REAL_ANSWER_S = 240.0


@dataclass
class Engine:
    """A running engine and what a caller needs to know of it."""

    kind: str
    url: str
    model: str
    process: subprocess.Popen[bytes]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=20)


Launch = Callable[..., Engine]


def start_emulated(ready_file: Path, **flags: object) -> subprocess.Popen[bytes]:
    given = {"profile": "laptop", "time_scale": 0.1, "ready_file": ready_file, **flags}
    arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen([sys.executable, "-m", "engines.emulated", *arguments], stdout=subprocess.DEVNULL)


Kind = Callable[[pytest.FixtureRequest], Iterator[Launch]]


def emulated(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """As many engines as are asked for, each a process; all are stopped when the module is through."""
    tmp_path_factory = request.getfixturevalue("tmp_path_factory")
    started: list[subprocess.Popen[bytes]] = []

    def start(**flags: object) -> Engine:
        ready_file = tmp_path_factory.mktemp("engine") / "ready.json"
        process = start_emulated(ready_file, **flags)
        started.append(process)
        url = _wait_for(ready_file, process)["url"]
        return Engine("emulated", url, httpx.get(f"{url}/microserving/info").json()["model"], process)

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(timeout=20)


def sglang(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """The two engines that all tests of the session share: starting others would take minutes."""
    pair: Pair = request.getfixturevalue("sglang_pair")
    pair.mend()
    waiting = list(pair.engines)

    def take(**flags: object) -> Engine:
        if flags or not waiting:
            pytest.skip(f"all real engines are started with the same flags, not with {flags}")
        engine = waiting.pop(0)
        assert engine.process is not None
        return Engine("sglang", engine.url, engine.model, engine.process)

    yield take


KINDS: dict[str, Kind] = {"emulated": emulated, "sglang": sglang}
REAL = ("sglang",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.real] if kind in REAL else []) for kind in sorted(KINDS)],
)
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Start an engine and wait until it serves."""
    yield from KINDS[request.param](request)


@pytest.fixture(autouse=True)
def leave_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Real engines are shared: a test that fails half-way must not be the next one's misfortune."""
    pair: Pair | None = request.getfixturevalue("sglang_pair") if _kind_of(request.node) in REAL else None
    yield
    if pair is not None:
        pair.mend()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Real engines are not asked what is marked `emulated`."""
    left_out = [item for item in items if item.get_closest_marker("emulated") and _kind_of(item) in REAL]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _kind_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("launch")


def _wait_for(ready_file: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if ready_file.exists():
            found: dict[str, Any] = json.loads(ready_file.read_text())
            return found
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with {process.returncode} before it served")
        time.sleep(0.02)
    raise RuntimeError("the engine did not become ready")


@pytest.fixture(scope="module")
def engine(launch: Launch) -> Engine:
    """The engine that most tests of a module share. Leave it as you found it."""
    return launch()


@pytest.fixture(scope="module")
def sender(launch: Launch) -> Engine:
    return launch()


@dataclass
class Caller:
    """Speaks to engines. One request id and one prompt after the other, none twice."""

    http: httpx.AsyncClient
    random: random.Random
    brevity: float = 1.0
    """Prompts are shortened to this share: a real model on a CPU reads a few hundred tokens a second."""
    serial: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_id(self) -> str:
        return f"r{self.random.getrandbits(48):x}-{next(self.serial)}"

    def text(self, words: int = 200) -> str:
        """A prompt nobody has sent before."""
        return " ".join(f"{self.random.getrandbits(20):x} word" for _ in range(max(1, round(words * self.brevity))))

    def brief(self, count: int) -> int:
        """So many tokens of an answer, or fewer where they take long."""
        return max(1, round(count * self.brevity))

    async def tokens(self, engine: Engine, text: str) -> list[int]:
        answer = await self.http.post(f"{engine.url}/tokenize", json={"prompt": text})
        found: list[int] = answer.json()["tokens"]
        return found

    async def post(self, engine: Engine, verb: str, **body: object) -> httpx.Response:
        return await self.http.post(f"{engine.url}/microserving/{verb}", json=body)

    async def load(self, engine: Engine) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"{engine.url}/microserving/load")).json()
        return found

    async def is_running(self, engine: Engine) -> bool:
        return bool((await self.load(engine))["running"])

    async def is_idle(self, engine: Engine) -> bool:
        """Nothing runs, waits or holds KV; what is aborted in a pass holds its KV until the pass ends."""
        load = await self.load(engine)
        return not any(load[name] for name in ("running", "queued", "kv_used_tokens"))

    async def metric(self, engine: Engine, name: str) -> float:
        text = (await self.http.get(f"{engine.url}/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def reserve(self, engine: Engine, prompt: list[int], end: int, ttl_s: float = 30.0, **more: Any) -> Any:
        """`(request id, answer)` of a `prep_recv` that must succeed."""
        request_id = more.get("request_id") or self.new_id()
        answer = await self.post(engine, "prep_recv", request_id=request_id, prompt=prompt, end=end, ttl_s=ttl_s)
        assert answer.status_code == 200, answer.text
        return request_id, answer.json()

    async def send(
        self, sender: Engine, request_id: str, prompt: list[int], reserved: dict[str, Any], end: int
    ) -> httpx.Response:
        return await self.post(
            sender,
            "remote_send",
            request_id=request_id,
            prompt=prompt,
            kv_addr_info=reserved["kv_addr_info"],
            begin=reserved["prefix_matched_length"],
            end=end,
        )

    async def generate(self, engine: Engine, request_id: str, text: str, **more: Any) -> httpx.Response:
        """`start_generate` of a completion; `call` adds to the verb, everything else to the client's body."""
        call = more.pop("call", {})
        body = {"model": engine.model, "prompt": text, "max_tokens": 12, "temperature": 0, **more}
        return await self.post(engine, "start_generate", request_id=request_id, api="completions", body=body, **call)


@pytest.fixture
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[Caller]:
    is_real = _kind_of(request.node) in REAL
    async with httpx.AsyncClient(timeout=REAL_ANSWER_S if is_real else ANSWER_S) as http:
        yield Caller(http, random.Random(request.node.nodeid), REAL_BREVITY if is_real else 1.0)


async def eventually(holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await holds():
            await asyncio.sleep(0.02)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    return eventually


@dataclass
class Proxy:
    """A TCP proxy that can harm what goes from its client to its target."""

    target_port: int
    server: asyncio.Server | None = None
    corrupt_at: int | None = None
    """Flip the byte at this position."""
    cut_at: int | None = None
    """Close both sides after this many bytes."""

    @property
    def address(self) -> str:
        assert self.server is not None
        host, port = self.server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_target, to_target = await asyncio.open_connection("127.0.0.1", self.target_port)
        back = asyncio.create_task(self._copy_back(from_target, writer))
        with contextlib.suppress(OSError):
            await self._copy_harmfully(reader, to_target)
            await back
        to_target.close()
        writer.close()

    async def _copy_harmfully(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(4096):
            if self.corrupt_at is not None and passed <= self.corrupt_at < passed + len(data):
                at = self.corrupt_at - passed
                data = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
            if self.cut_at is not None and passed + len(data) > self.cut_at:
                writer.write(data[: self.cut_at - passed])
                writer.close()
                return
            passed += len(data)
            writer.write(data)
            await writer.drain()

    @staticmethod
    async def _copy_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
            writer.close()


@pytest.fixture
async def proxy(free_port: Callable[[], int]) -> AsyncIterator[Proxy]:
    """Stands before the transfer port `proxy.target_port`, which is free for an engine to take."""
    proxy = Proxy(free_port())
    proxy.server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    yield proxy
    proxy.server.close()
