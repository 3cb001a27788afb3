"""Controllers as processes of their own, and clients that keep a fleet busy meanwhile."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.fleet import MODEL, text_of, until

START_S = 60.0
DECIDED_S = 150.0
"""Until a decision: the first one may have to wait for the twin to be compiled."""

QUICK = {
    "TRIMTAB_TUNER__MIN_REQUESTS": "10",
    "TRIMTAB_TUNER__BUDGET_S": "0.5",
    "TRIMTAB_TUNER__TRIALS": "20",
    "TRIMTAB_TUNER__REPLICAS": "2",
    "TRIMTAB_TUNER__FINALISTS": "2",
    "TRIMTAB_TUNER__HORIZON_S": "20",
    "TRIMTAB_TUNER__SEARCH_EVERY_S": "2",
    "TRIMTAB_RECOVERY_S": "6",
}
"""Decisions within seconds; how good they are is for the benchmarks to say."""


@dataclass
class ControllerProcess:
    controller_id: str
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    async def get(self, path: str) -> dict[str, Any]:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def leads(self) -> bool:
        return "trimtab_controller_leader 1.0" in (await self.http.get("/metrics")).text

    async def decisions(self) -> list[dict[str, Any]]:
        """Newest first."""
        return list((await self.get("/v1/decisions?count=100"))["decisions"])

    async def decided(self, that: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The newest decision for which `that` holds, once there is one."""

        async def found() -> dict[str, Any] | None:
            return next((each for each in await self.decisions() if that(each)), None)

        decision: dict[str, Any] = await until(found, what, DECIDED_S)
        return decision

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


StartController = Callable[..., Awaitable[ControllerProcess]]


@asynccontextmanager
async def controller_processes(folder: Path) -> AsyncIterator[StartController]:
    """A way to start controllers: `await start("a", redis_url)`; all are gone afterwards."""
    async with AsyncExitStack() as held:

        async def start(controller_id: str, redis_url: str, **flags: object) -> ControllerProcess:
            ready = folder / f"{controller_id}.ready"
            given = {"model": MODEL, "port": 0, "tick_s": 0.5, "lease_s": 2, "redis_url": redis_url} | flags
            given |= {"controller_id": controller_id, "ready_file": ready}
            args = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
            kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIMTAB_")}
            with (folder / f"{controller_id}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "controller.cli", "controller", *args,
                    stdout=log, stderr=log, env=kept | QUICK,
                )  # fmt: skip
            held.push_async_callback(_end, process)
            await until(lambda: ready.exists() or process.returncode is not None, f"{controller_id} serves", START_S)
            assert process.returncode is None, (folder / f"{controller_id}.log").read_text()
            url = json.loads(ready.read_text())["url"]
            http = await held.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            return ControllerProcess(controller_id, process, http)

        yield start


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


@dataclass
class Clients:
    """Requests that keep coming, whatever becomes of those before. `wrong` holds what was no whole answer."""

    http: httpx.AsyncClient
    every_s: float = 0.2
    sent: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    streams: bool = True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as requests:
            while True:
                self.sent += 1
                requests.create_task(self._ask(self.sent))
                await asyncio.sleep(self.every_s)

    async def _ask(self, number: int) -> None:
        body = {"model": MODEL, "prompt": text_of(60 + 40 * (number % 8), salt=f"n{number}"), "max_tokens": 12}
        stream = self.streams and number % 2 == 0
        try:
            answer = await self.http.post("/v1/completions", json=body | {"stream": stream})
        except httpx.HTTPError as error:
            self.wrong.append(repr(error))
            return
        whole = answer.text.rstrip().endswith("data: [DONE]") if stream else "choices" in answer.text
        if answer.status_code == 200 and whole and "error" not in answer.text:
            self.answered += 1
        else:
            self.wrong.append(f"{answer.status_code}: {answer.text[-500:]}")


@asynccontextmanager
async def busy(http: httpx.AsyncClient) -> AsyncIterator[Clients]:
    """Clients that send all the while; on leaving they stop."""
    clients = Clients(http)
    sending = asyncio.create_task(clients.run())
    try:
        yield clients
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    if not sending.cancelled():
        sending.result()
