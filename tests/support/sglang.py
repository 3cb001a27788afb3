"""Real SGLang engines on the CPU, each on a core of its own, started once and shared by all tests of a session."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.stack import tether
from engines.sglang.launcher import PYTHON_VARIABLE

ROOT = Path(__file__).parents[2]
MODEL_VARIABLE = "TRIMTAB_SMALL_MODEL"
MODEL = "smollm2-135m"
START_S = 600.0
STOP_S = 30.0
ANSWER_S = 120.0
LOG_TAIL = 3000
BYTES_PER_TOKEN = 23_040
"""Of this model's KV in bfloat16: 2 · 30 layers · 3 heads · 64 · 2."""
WITHOUT_VERBS = "trimtab-cpu"
"""The plugins of a plain engine: only the one that makes attention on a CPU affordable."""


def model_folder() -> Path:
    folder = ROOT / os.environ.get(MODEL_VARIABLE, f".models/{MODEL}")
    if not (folder / "config.json").is_file():
        pytest.fail(f"there is no model in {folder}: run these tests with `make test-real`")
    return folder


def environment(**more: str) -> dict[str, str]:
    python = os.environ.get(PYTHON_VARIABLE, str(ROOT / ".venv-sglang" / "bin" / "python"))
    return {**os.environ, PYTHON_VARIABLE: python, **more}


@dataclass
class RealEngine:
    """One engine. `start` and `kill` may be called again and again; it keeps its port."""

    engine_id: str
    core: int
    port: int
    folder: Path
    redis_url: str | None = None
    plugins: str | None = None
    flags: tuple[str, ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""
    process: subprocess.Popen[bytes] | None = None
    starts: int = field(default=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> str:
        return MODEL

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.engine_id}.log"

    def start(self) -> None:
        """Returns at once; `wait` waits."""
        self.starts += 1
        self._ready_file.unlink(missing_ok=True)
        given = {
            "model": model_folder(),
            "device": "cpu",
            "cores": self.core,
            "port": self.port,
            "engine-id": self.engine_id,
            "served-model-name": MODEL,
            "ready-file": self._ready_file,
        }
        arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        own = {"TRIMTAB_SGLANG_REDIS_URL": self.redis_url, "SGLANG_PLUGINS": self.plugins, **self.more}
        command = [sys.executable, tether.__file__, str(os.getpid()), sys.executable, "-m", "controller.cli"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "engine", "sglang", *arguments, *self.flags],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment(**{name: value for name, value in own.items() if value is not None}),
            )

    def wait(self) -> None:
        """Until it serves."""
        process = self._running()
        give_up_s = time.monotonic() + START_S
        while not self._ready_file.exists():
            if process.poll() is not None or time.monotonic() > give_up_s:
                pytest.fail(f"{self.engine_id} did not start:\n{self.log_tail()}")
            time.sleep(0.2)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL; its children die with it."""
        process = self._running()
        process.kill()
        process.wait(STOP_S)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long."""
        if not self.is_alive:
            return
        process = self._running()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
            return
        self.kill()

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-LOG_TAIL:]

    @property
    def _ready_file(self) -> Path:
        return self.folder / f"{self.engine_id}.json"

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, f"{self.engine_id} has not been started"
        return self.process


def cores() -> list[int]:
    """Two cores, or the same one twice."""
    found = sorted(os.sched_getaffinity(0))
    return [found[0], found[-1]]


@dataclass
class Pair:
    """Two engines with the verbs, and what a plain engine answered to the same questions."""

    engines: tuple[RealEngine, RealEngine]
    plain_answers: Mapping[str, Any]
    """By the name of the question."""
    knobs: Mapping[str, Any]
    """That both started with."""

    def revive(self) -> None:
        """Start again what a test has killed, and wait until both serve."""
        dead = [engine for engine in self.engines if not engine.is_alive]
        for engine in dead:
            engine.start()
        for engine in dead:
            engine.wait()

    def mend(self) -> None:
        """`revive`, and take back what tests change: knobs, and that an engine takes no work."""
        self.revive()
        for engine in self.engines:
            httpx.post(f"{engine.url}/microserving/drain", json={"on": False}, timeout=ANSWER_S).raise_for_status()
            httpx.post(f"{engine.url}/microserving/config", json=self.knobs, timeout=ANSWER_S).raise_for_status()


Question = tuple[str, dict[str, Any]]
"""Path and JSON body."""


@contextlib.contextmanager
def running_pair(
    folder: Path,
    free_port: Callable[[], int],
    redis_url: str | None,
    questions: Mapping[str, Question],
    traces_url: str | None = None,
) -> Iterator[Pair]:
    """Start a plain engine and the pair side by side; the plain one answers the questions and is stopped.

    With `traces_url`, the pair traces what its caller traces.
    """
    # Of requests that come without a trace, none is the first of one: most tests do not ask for any.
    more = {} if traces_url is None else {"TRIMTAB_SGLANG_TRACES_URL": traces_url, "TRIMTAB_SGLANG_TRACES_RATIO": "0"}
    first, last = cores()
    plain = RealEngine("plain", first, free_port(), folder, plugins=WITHOUT_VERBS)
    pair = tuple(
        RealEngine(f"e{number}", core, free_port(), folder, redis_url, more=more)
        for number, core in enumerate((first, last))
    )
    started = [plain, *pair]
    try:
        for engine in started:
            engine.start()
        plain.wait()
        answers = {name: ask(plain.url, question) for name, question in questions.items()}
        plain.kill()
        for engine in pair:
            engine.wait()
        yield Pair((pair[0], pair[1]), answers, knobs_of(pair[0]))
    finally:
        for engine in started:
            if engine.is_alive:
                engine.kill()


def knobs_of(engine: RealEngine) -> Mapping[str, Any]:
    load = httpx.get(f"{engine.url}/microserving/load", timeout=ANSWER_S).json()
    return {name: load[name] for name in ("chunked_prefill_tokens", "prefill_decode_interval")}


def ask(url: str, question: Question) -> Any:
    """The answer as JSON; of a stream, its events."""
    path, body = question
    with httpx.Client(base_url=url, timeout=ANSWER_S) as http:
        answer = http.post(path, json=body) if body else http.get(path)
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json() | {"status": answer.status_code}
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
