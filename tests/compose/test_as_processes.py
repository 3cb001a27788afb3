"""What docker-compose.yml says to containers of the demo, said to processes here."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from controller.store import Keys, open_store
from engines.records import Outcome, RequestRecord
from tests.compose.compose_file import CHECKOUT, MODEL, SECRETS, SERVICES, command_of, engines, environment_of, names_of

LIVENESS_S = 60.0


class Containers:
    """The services as processes of this machine: other addresses, otherwise what the file says."""

    def __init__(self, redis_url: str, free_port: Callable[[], int], folder: Path) -> None:
        self._folder = folder
        self._redis = urlsplit(redis_url).netloc
        self.router_port, self.admin_port = free_port(), free_port()
        self._ports = {"router": {"8080": self.router_port}, "controller": {"8081": self.admin_port}}
        self._ports |= {name: {"8000": free_port(), "8001": free_port()} for name in engines("demo").values()}

    def text(self, service: str, value: str) -> str:
        """A flag, variable or health check of a service, with the addresses of this machine in it."""
        value = value.replace(f":{SECRETS['REDIS_PASSWORD']}@redis:6379", self._redis).replace("0.0.0.0", "127.0.0.1")
        for name in names_of(service):
            value = value.replace(name, "127.0.0.1")
        for inside, outside in self._ports[service].items():
            value = re.sub(rf"(^|:){inside}\b", rf"\g<1>{outside}", value)
        return value

    @contextlib.asynccontextmanager
    async def running(self, service: str) -> AsyncIterator[None]:
        """The process of a service, once its health check is content."""
        # The command's own name may be that of the service.
        command = [part if part == service else self.text(service, part) for part in command_of(service)]
        # Caches of the image's, and a trace viewer that is not there, are left out.
        own = {
            name: value for name, value in environment_of(service).items() if not name.endswith(("_DIR", "TRACES_URL"))
        }
        process = await self._spawn(
            ["-m", "controller.cli", *command], {n: self.text(service, v) for n, v in own.items()}
        )
        try:
            async with asyncio.timeout(LIVENESS_S):
                while not await self._healthy(service):
                    assert process.returncode is None
                    await asyncio.sleep(0.2)
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def _healthy(self, service: str) -> bool:
        kind, python, *arguments = SERVICES[service]["healthcheck"]["test"]
        assert (kind, python) == ("CMD", "python3")
        check = await self._spawn([self.text(service, part) for part in arguments], {})
        return await check.wait() == 0

    async def _spawn(self, arguments: list[str], own: Mapping[str, str]) -> asyncio.subprocess.Process:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIMTAB_")}
        with (self._folder / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env={**kept, **own, "PYTHONPATH": str(CHECKOUT)}, cwd=self._folder,
                stdout=log, stderr=log,
            )  # fmt: skip


async def test_what_the_file_says_makes_a_fleet_that_serves(
    redis_url: str, free_port: Callable[[], int], tmp_path: Path
) -> None:
    containers = Containers(redis_url, free_port, tmp_path)
    async with contextlib.AsyncExitStack() as held:
        for service in (*engines("demo").values(), "controller", "router"):
            await held.enter_async_context(containers.running(service))
        client = await held.enter_async_context(httpx.AsyncClient(timeout=30))
        await set_balanced(client, f"http://127.0.0.1:{containers.admin_port}/v1")
        body = {"model": MODEL, "prompt": "Hello there, " * 20, "max_tokens": 4}
        url = f"http://127.0.0.1:{containers.router_port}/v1/completions"
        assert (await client.post(url, json=body)).status_code == 401
        answer = await client.post(url, json=body, headers={"authorization": f"Bearer {SECRETS['API_KEY']}"})
        assert answer.json()["choices"][0]["text"]
        served = await last_record(redis_url)
        # One engine sent KV to the other, at the address that the other advertises.
        assert (served.pattern, served.transfer_failures) == ("balanced", 0)
        assert {served.prefill_engine, served.decode_engine} == {"e0", "e1"}
        assert served.transferred_bytes


async def set_balanced(client: httpx.AsyncClient, admin: str) -> None:
    """Returns once the router has applied it."""
    token = {"authorization": f"Bearer {SECRETS['ADMIN_TOKEN']}"}
    plan = {"pattern": "balanced", "knobs": {"offload_ratio": 0.1, "min_remote_tokens": 0}}
    assert (await client.put(f"{admin}/plan", json=plan, headers=token)).status_code == 200
    async with asyncio.timeout(LIVENESS_S):
        while not (await client.get(f"{admin}/routers", headers=token)).json()["routers"][0]["up_to_date"]:
            await asyncio.sleep(0.1)


async def last_record(redis_url: str) -> RequestRecord:
    """Of a request that was served."""
    async with contextlib.aclosing(open_store(redis_url)) as store, asyncio.timeout(LIVENESS_S):
        while True:
            for entry in await store.latest(Keys(MODEL).requests, 1):
                record = msgspec.json.decode(entry.value, type=RequestRecord)
                if record.outcome is Outcome.OK:
                    return record
            await asyncio.sleep(0.1)
