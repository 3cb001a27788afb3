"""The proxies that are measured: how each is started, when it is ready, and why it may be missing here."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from benchmarks.router.httpx_proxy import ENGINES_VARIABLE

WRAP_VARIABLE = "TRIMTAB_BENCH_WRAP"
DIRECT = "direct"
TRIMTAB = "trimtab"
REFERENCE = "sglang-router"
HAPROXY = "haproxy"


@dataclass(frozen=True, slots=True)
class Place:
    """What a target is started with: its port, the engines behind it, a folder of its own, perhaps Redis."""

    port: int
    spare_port: int
    engines: Sequence[str]
    folder: Path
    redis_url: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """`command` gives the command line; `missing` a reason why it cannot run here, or `None`."""

    name: str
    command: Callable[[Place], Sequence[str]]
    ready_path: str
    missing: Callable[[], str | None]
    takes_ids: bool = True
    """Whether `/v1/completions` takes token ids; else they go to `/generate`."""
    needs_redis: bool = False
    environment: Callable[[Place], Mapping[str, str]] = field(default=lambda _: {})


def _trimtab(place: Place) -> list[str]:
    command = [*shlex.split(os.environ.get(WRAP_VARIABLE, "")), sys.executable, "-m", "controller.cli", "router"]
    command += ["--model", "bench", "--port", str(place.port)]
    for engine in place.engines:
        command += ["--engine", engine]
    return [*command, "--redis-url", str(place.redis_url)]


def _sglang_router(policy: str) -> Callable[[Place], Sequence[str]]:
    return lambda place: [sys.executable, "-m", "sglang_router.launch_router", *_gateway_options(place, policy)]


def _smg(place: Place) -> list[str]:
    return [sys.executable, "-m", "smg.cli", "launch", *_gateway_options(place, "round_robin")]


def _gateway_options(place: Place, policy: str) -> list[str]:
    listen = ["--host", "127.0.0.1", "--port", str(place.port)]
    listen += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.spare_port)]
    return [*listen, "--policy", policy, "--log-level", "warn", "--worker-urls", *place.engines]


HAPROXY_CONFIG = """
global
  maxconn 4096
  nbthread 1
defaults
  mode http
  balance roundrobin
  http-reuse always
  option http-no-delay
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend clients
  bind 127.0.0.1:{port}
  http-request return status 200 if {{ path /ready }}
  default_backend engines
backend engines
{servers}
"""


def _haproxy(place: Place) -> list[str]:
    addresses = [engine.removeprefix("http://") for engine in place.engines]
    servers = "\n".join(f"  server engine{number} {address}" for number, address in enumerate(addresses))
    config = place.folder / "haproxy.cfg"
    config.write_text(HAPROXY_CONFIG.format(port=place.port, servers=servers))
    return [haproxy_executable() or HAPROXY, "-db", "-f", str(config)]


def _httpx_proxy(place: Place) -> list[str]:
    serve = [sys.executable, "-m", "uvicorn", "--factory", "benchmarks.router.httpx_proxy:app"]
    listen = ["--host", "127.0.0.1", "--port", str(place.port), "--loop", "uvloop", "--http", "httptools"]
    return [*serve, *listen, "--no-access-log", "--log-level", "warning"]


def haproxy_executable() -> str | None:
    """Debian puts servers into a folder that is not on every user's PATH."""
    return shutil.which(HAPROXY) or shutil.which(HAPROXY, path="/usr/sbin:/usr/local/sbin")


def _without_module(module: str, remedy: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        return None if found else f"{module} is not installed: {remedy}"

    return missing


def _without_haproxy() -> str | None:
    return None if haproxy_executable() else "no haproxy on the PATH: apt-get install haproxy"


_BENCH_EXTRA = "pip install -r requirements/bench.lock"
_NO_TRIMTAB = _without_module("controller.cli", "pip install -e .")
_NO_SGLANG = _without_module("sglang_router.launch_router", _BENCH_EXTRA)
_NO_SMG = _without_module("smg.cli", _BENCH_EXTRA)

TARGETS: dict[str, Target] = {
    each.name: each
    for each in (
        # No process of its own: the load talks to the backend, which shows the floor of every latency.
        Target(DIRECT, lambda _: [], "/health", lambda: None),
        Target(TRIMTAB, _trimtab, "/ready", _NO_TRIMTAB, needs_redis=True),
        Target(REFERENCE, _sglang_router("round_robin"), "/readiness", _NO_SGLANG, takes_ids=False),
        Target("sglang-router-cache", _sglang_router("cache_aware"), "/readiness", _NO_SGLANG, takes_ids=False),
        Target("smg", _smg, "/readiness", _NO_SMG, takes_ids=False),
        Target(HAPROXY, _haproxy, "/ready", _without_haproxy),
        Target(
            "fastapi-httpx",
            _httpx_proxy,
            "/ready",
            lambda: None,
            environment=lambda place: {ENGINES_VARIABLE: ",".join(place.engines)},
        ),
    )
}
