"""The processes of a live run, and the few calls of the admin API that it needs."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from benchmarks.adapt.scenarios import Scenario, ScenarioError
from controller.stack.embedded import embedded_redis
from controller.stack.parts import Parts, StackOptions
from controller.stack.supervise import ChildSpec, Supervisor
from tuner.plan import Plan
from tuner.slo import SloTable
from tuner.types import Mode

READY_S = 180.0
"""The controller may have to compile the twin first."""


class NotReady(Exception):
    """The stack did not become what was asked of it in time; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class LiveStack:
    """Addresses of a running stack. Methods raise `httpx.HTTPError` if the admin API refuses or does not answer."""

    url: str
    model: str
    admin: httpx.AsyncClient

    async def put(self, path: str, body: Mapping[str, Any]) -> None:
        (await self.admin.put(path, json=body)).raise_for_status()

    async def get(self, path: str) -> Any:
        return (await self.admin.get(path)).raise_for_status().json()

    async def pin(self, plan: Plan) -> None:
        """Put a plan in force for good; returns once the router goes by it."""
        await self.put("/v1/mode", {"mode": Mode.MANUAL.value})
        await self.put("/v1/plan", plan.model_dump(mode="json", include={"pattern", "knobs", "roles", "reason"}))
        await until(self._all_applied, "the router applies the plan")

    async def tuned(self) -> None:
        """Returns once the tuner has made its first decision: that there is no traffic yet."""
        await until(self._has_decided, "the tuner decides")

    async def plans(self) -> list[dict[str, Any]]:
        """Every plan so far, oldest first."""
        return list(reversed((await self.get("/v1/plan/history"))["plans"]))

    async def sees(self, engines: int) -> bool:
        """Whether controller and router know so many engines."""
        listed = len((await self.get("/v1/engines"))["engines"]) == engines
        return listed and (await self.admin.get(f"{self.url}/ready")).is_success

    async def _all_applied(self) -> bool:
        found = await self.get("/v1/routers")
        applied = [router["plan_version"] for router in found["routers"]]
        return bool(applied) and all(version == found["plan_version"] for version in applied)

    async def _has_decided(self) -> bool:
        return bool((await self.get("/v1/decisions"))["decisions"])


@asynccontextmanager
async def live_stack(scenario: Scenario, folder: Path) -> AsyncIterator[LiveStack]:
    """Redis, engines, controller and router from a cold start, with the scenario's SLOs; nothing of it is left.

    Raises `NotReady`, `DiedAtStart` or `RedisDidNotStart`; `ScenarioError` for engines that no profile describes.
    """
    if scenario.engines.overrides:
        raise ScenarioError(f"{scenario.name}: engines that differ from their profile cannot be started as processes")
    model, token = scenario.profile.model, secrets.token_urlsafe(16)
    options = StackOptions(engines=scenario.engines.count, profile=scenario.engines.profile, port=0, admin_port=0)
    async with embedded_redis() as redis, Supervisor(folder, note(folder)) as children:
        parts = Parts(options, model, token, redis.url)
        await children.start(*parts.engines())
        async with controlled(children, parts, scenario.slos) as stack:
            yield stack


@asynccontextmanager
async def controlled(children: Supervisor, parts: Parts, slos: SloTable) -> AsyncIterator[LiveStack]:
    """A controller and a router for engines that run already, once both know all of these. Raises `NotReady`."""
    admin_url, url = await _one(children, parts.controller()), await _one(children, parts.router())
    headers = {"authorization": f"Bearer {parts.admin_token}"}
    async with httpx.AsyncClient(base_url=admin_url, headers=headers, timeout=10) as admin:
        stack = LiveStack(url, parts.model, admin)
        await stack.put("/v1/slo", {"classes": {name: slo.model_dump() for name, slo in slos.classes.items()}})
        await until(lambda: stack.sees(parts.options.engines), "controller and router know all engines")
        yield stack


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until it holds; raises `NotReady`."""

    async def holds() -> bool:
        return await condition()

    patiently = AsyncRetrying(
        retry=retry_if_result(lambda found: not found), wait=wait_fixed(0.2), stop=stop_after_delay(READY_S)
    )
    try:
        await patiently(holds)
    except RetryError:
        raise NotReady(f"did not happen within {READY_S:g} s: {what}") from None


async def _one(children: Supervisor, spec: ChildSpec) -> str:
    (child,) = await children.start(spec)
    if child.url is None:
        raise NotReady(f"{spec.name} does not say where it listens")
    return child.url


def note(folder: Path) -> Callable[[str], None]:
    """What happens to the children goes to a file, not into the report."""

    def say(line: str) -> None:
        with (folder / "stack.log").open("a") as log:
            log.write(line + "\n")

    return say
