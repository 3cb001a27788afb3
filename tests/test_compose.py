"""`docker-compose.yml` and `Dockerfile` beside the code: what they say to containers, said to processes here."""

import asyncio
import contextlib
import json
import os
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import typer.main
import yaml
from pydantic_settings import BaseSettings

from controller.cli.root import app
from controller.settings import AdminSettings, RouterSettings, load
from controller.store import Keys, open_store
from engines.emulated.settings import EmulatedSettings, load_settings
from engines.records import Outcome, RequestRecord

CHECKOUT = Path(__file__).parents[1]
COMPOSE = (CHECKOUT / "docker-compose.yml").read_text()
SERVICES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(COMPOSE)["services"]
OURS = [name for name in SERVICES if name != "redis"]
SETTINGS: Mapping[str, type[BaseSettings]] = {
    "router": RouterSettings,
    "controller": AdminSettings,
    "engine-0": EmulatedSettings,
    "engine-1": EmulatedSettings,
}
SECRETS = {"REDIS_PASSWORD": "redis-secret", "API_KEY": "client-secret", "ADMIN_TOKEN": "operator-secret"}
DOCKERFILE = (CHECKOUT / "Dockerfile").read_text()
LIVENESS_S = 60.0
MODEL = "trimtab-demo"


def interpolated(value: str) -> str:
    """What compose makes of a value, with `SECRETS` as its `.env`."""
    return re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: SECRETS[found[1]], value).replace("$$", "$")


def environment_of(service: str) -> dict[str, str]:
    return {name: interpolated(value) for name, value in SERVICES[service].get("environment", {}).items()}


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The parameters that the command line makes of them, without running anything."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    with command.make_context("trimtab", list(arguments)) as context:
        return context.params


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """The settings that a service's flags and environment amount to."""
    monkeypatch.chdir(tmp_path)

    def settings(service: str) -> Any:
        for name in [name for name in os.environ if name.startswith("TRIMTAB_")]:
            monkeypatch.delenv(name)
        for name, value in environment_of(service).items():
            monkeypatch.setenv(name, value)
        given = parsed(SERVICES[service]["command"])
        if SETTINGS[service] is EmulatedSettings:
            return load_settings(**given)
        if SETTINGS[service] is AdminSettings:
            given |= {"admin_host": given.pop("host"), "admin_port": given.pop("port")}
        return load(SETTINGS[service], **given)

    return settings


@pytest.mark.parametrize("service", OURS)
def test_every_environment_variable_is_a_setting_of_that_process(service: str) -> None:
    kind = SETTINGS[service]
    prefix = kind.model_config["env_prefix"]
    for name in environment_of(service):
        assert name.startswith(prefix)
        assert name.removeprefix(prefix).lower() in kind.model_fields


def test_the_parts_find_each_other_by_service_name(settings: Callable[[str], Any]) -> None:
    for name in ("engine-0", "engine-1"):
        engine = settings(name)
        assert (engine.host, engine.kv_host, engine.profile) == ("0.0.0.0", "0.0.0.0", "laptop")
        assert engine.advertise_url == f"http://{name}:{engine.port}"
        assert engine.kv_advertise == f"{name}:{engine.kv_port}"
    assert settings("engine-0").engine_id != settings("engine-1").engine_id
    for name in OURS:
        redis = urlsplit(settings(name).redis_url)
        assert (redis.hostname, redis.password) == ("redis", SECRETS["REDIS_PASSWORD"])
        assert f"--port {redis.port} " in SERVICES["redis"]["command"][2]


def test_router_and_controller_serve_the_model_of_the_engines_with_secrets_of_their_own(
    settings: Callable[[str], Any],
) -> None:
    router, controller = settings("router"), settings("controller")
    assert {router.model, controller.model} == {settings("engine-0").effective_profile().model}
    assert router.api_key.get_secret_value() == SECRETS["API_KEY"]
    assert controller.admin_token.get_secret_value() == SECRETS["ADMIN_TOKEN"]


def test_only_the_two_apis_are_published_and_on_loopback_only(settings: Callable[[str], Any]) -> None:
    router, controller = settings("router"), settings("controller")
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "router": [f"127.0.0.1:8080:{router.port}"],
        "controller": [f"127.0.0.1:8081:{controller.admin_port}"],
    }
    assert (router.host, controller.admin_host) == ("0.0.0.0", "0.0.0.0")


def test_the_router_is_not_killed_while_it_drains(settings: Callable[[str], Any]) -> None:
    assert int(SERVICES["router"]["stop_grace_period"].removesuffix("s")) > settings("router").drain_s


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_hardened_pinned_watched_and_restarted(service: str) -> None:
    said = SERVICES[service]
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", said["image"])
    assert said["read_only"] is True
    assert said["cap_drop"] == ["ALL"]
    assert said["restart"] == "unless-stopped"
    assert said["healthcheck"]["test"]
    assert set(said.get("depends_on", {})) <= set(SERVICES)
    assert not [part for part in said["command"] if "${" in part]


def test_the_example_of_secrets_names_exactly_those_asked_for() -> None:
    example = re.findall(r"^(\w+)=", (CHECKOUT / ".env.example").read_text(), re.MULTILINE)
    assert set(re.findall(r"\$\{(\w+)", COMPOSE)) == set(example) == set(SECRETS)
    # Processes read `.env` in their folder too: a name of theirs there would change a `make up` in the checkout.
    assert not [name for name in example if name.startswith("TRIMTAB_")]
    assert ".env" in (CHECKOUT / ".gitignore").read_text().split()


def test_the_image_runs_the_command_line_as_nobody_in_particular() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry)[0] in project["scripts"]
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11-slim$", DOCKERFILE, re.MULTILINE)
    assert "PYTHON_IMAGE" in SERVICES["router"]["build"]["args"]
    assert int(re.findall(r"^USER (\d+)", DOCKERFILE, re.MULTILINE)[-1]) > 0


def test_all_that_the_image_copies_is_there_and_in_its_context() -> None:
    copied = [source for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]
    context = re.findall(r"^!(.*)$", (CHECKOUT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(copied) == set(context)
    assert all((CHECKOUT / source).exists() for source in copied)


class Containers:
    """The services as processes of this machine: other addresses, otherwise what the file says."""

    def __init__(self, redis_url: str, free_port: Callable[[], int], folder: Path) -> None:
        self._folder = folder
        self._redis = urlsplit(redis_url).netloc
        self.router_port, self.admin_port = free_port(), free_port()
        self._ports = {"router": {"8080": self.router_port}, "controller": {"8081": self.admin_port}}
        self._ports |= {name: {"8000": free_port(), "8001": free_port()} for name in ("engine-0", "engine-1")}

    def text(self, service: str, value: str) -> str:
        """A flag, variable or health check of a service, with the addresses of this machine in it."""
        value = interpolated(value).replace(f":{SECRETS['REDIS_PASSWORD']}@redis:6379", self._redis)
        value = value.replace("0.0.0.0", "127.0.0.1").replace(service, "127.0.0.1")
        for inside, outside in self._ports[service].items():
            value = re.sub(rf"(^|:){inside}\b", rf"\g<1>{outside}", value)
        return value

    @contextlib.asynccontextmanager
    async def running(self, service: str) -> AsyncIterator[None]:
        """The process of a service, once its health check is content."""
        said = SERVICES[service]
        # The command's own name may be that of the service.
        command = [part if part == service else self.text(service, part) for part in said["command"]]
        own = {name: self.text(service, value) for name, value in said["environment"].items()}
        process = await self._spawn(["-m", "controller.cli", *command], own)
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
        assert (kind, python) == ("CMD", "python")
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
        for service in ("engine-0", "engine-1", "controller", "router"):
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
