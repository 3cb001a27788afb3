"""The profile `demo` of docker-compose.yml, brought up by Podman on stand-ins for the public images."""

import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.compose.machine import Machine, build_arguments

CHECKOUT = Path(__file__).parents[2]
PROJECT = "trimtab-compose-test"
LEFT_OUT = ("grafana", "jaeger")
"""No Debian package has them."""
HEALTHY_S = 180.0
SECRETS = ("REDIS_PASSWORD", "API_KEY", "ADMIN_TOKEN")
PORTS = ("ROUTER_PORT", "ADMIN_PORT", "PROMETHEUS_PORT")


@dataclass(frozen=True, slots=True)
class Demo:
    """The containers, once they run; their ports are on loopback."""

    machine: Machine
    env_file: Path
    values: Mapping[str, str] = field(repr=False)

    @property
    def router(self) -> httpx.Client:
        return self._client("ROUTER_PORT", self.values["API_KEY"])

    @property
    def admin(self) -> httpx.Client:
        return self._client("ADMIN_PORT", self.values["ADMIN_TOKEN"])

    def _client(self, port: str, token: str) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.values[port]}",
            headers={"authorization": f"Bearer {token}"},
            timeout=30,
        )

    def chat(self) -> int:
        """The status that a short chat is answered with."""
        body = {"model": "trimtab-demo", "messages": [{"role": "user", "content": "Good morning"}], "max_tokens": 8}
        with self.router as router:
            return router.post("/v1/chat/completions", json=body).status_code

    def query(self, expr: str) -> Sequence[float]:
        """The values of an expression, in Prometheus."""
        url = f"http://127.0.0.1:{self.values['PROMETHEUS_PORT']}/api/v1/query"
        answer = httpx.get(url, params={"query": expr}, timeout=30).json()
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def compose(self, *arguments: str) -> str:
        return self.machine.run(*self._command(), *arguments, cwd=CHECKOUT)

    def _command(self) -> Sequence[str]:
        options = ["--env-file", str(self.env_file), "-p", PROJECT, "--in-pod", "false"]
        return ["podman-compose", *options, f"--podman-build-args={build_arguments()}"]

    def services(self) -> Sequence[str]:
        """Those of the profile for which there are images here."""
        return [name for name in self.compose("config", "--services").split() if name not in LEFT_OUT]

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container."""
        return subprocess.run(
            ["podman", "exec", self.container(service), *command],
            env=self.machine.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def container(self, service: str) -> str:
        return f"{PROJECT}_{service}_1"

    def until_healthy(self, services: Sequence[str]) -> None:
        """Podman has systemd run health checks, which is not everywhere; here they are run by hand."""
        for service in services:
            if self._has_check(service):
                wait_until(partial(self._healthy, service), partial(self._complaint, service))

    def _has_check(self, service: str) -> bool:
        wanted = ("--format", "{{.Config.Healthcheck}}", self.container(service))
        return self.machine.run("podman", "inspect", *wanted).strip() != "<nil>"

    def _healthy(self, service: str) -> bool:
        return self.machine.succeeds("podman", "healthcheck", "run", self.container(service))

    def _complaint(self, service: str) -> str:
        return f"{service} is healthy; it says:\n{self.logs(service)}"

    def logs(self, service: str) -> str:
        done = subprocess.run(
            ["podman", "logs", "--tail", "50", self.container(service)],
            env=self.machine.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def leftovers(self) -> Sequence[str]:
        """Containers, volumes and networks of the project."""
        found = [self.machine.run("podman", "ps", "--all", "--format", "{{.Names}}")]
        found += [self.machine.run("podman", kind, "ls", "--format", "{{.Name}}") for kind in ("volume", "network")]
        return [name for names in found for name in names.split() if name.startswith(PROJECT)]


@contextlib.contextmanager
def running_demo(machine: Machine, folder: Path, free_port: Callable[[], int]) -> Iterator[Demo]:
    """Built from this checkout and serving; afterwards nothing of it is left but its images."""
    image = machine.stand_in()
    values = {name: secrets.token_hex(16) for name in SECRETS} | {name: str(free_port()) for name in PORTS}
    values |= dict.fromkeys(("PYTHON_IMAGE", "REDIS_IMAGE", "PROMETHEUS_IMAGE"), image)
    # The demo's own rate is for a laptop that has nothing else to do.
    values["LOAD_RATE"] = "1"
    env_file = folder / "env"
    env_file.write_text(filled_in((CHECKOUT / ".env.example").read_text(), values))
    demo = Demo(machine, env_file, values)
    demo.compose("down", "--volumes")
    try:
        demo.compose("build", "router")
        demo.compose("up", "--detach", *demo.services())
        demo.until_healthy(demo.services())
        yield demo
    finally:
        demo.compose("down", "--volumes")


def filled_in(example: str, values: Mapping[str, str]) -> str:
    """The example of `.env` with other values; what it does not name is a mistake here or there."""
    for name, value in values.items():
        example, found = re.subn(rf"^#?{name}=.*$", f"{name}={value}", example, flags=re.MULTILINE)
        assert found == 1, name
    return example


def wait_until(happened: Callable[[], bool], what: Callable[[], str], limit_s: float = HEALTHY_S) -> None:
    """`what` says what was waited for in vain."""
    give_up_s = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > give_up_s:
            pytest.fail(f"not within {limit_s:g} s: {what()}")
        time.sleep(1)
