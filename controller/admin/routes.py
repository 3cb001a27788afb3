"""The admin API's endpoints: thin, each one call into a service."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Field

from controller.admin.answers import (
    DrainAnswer,
    EngineList,
    IssuedPlan,
    MigrationList,
    PlanHistory,
    RouterList,
    engine_view,
    router_view,
)
from controller.admin.migrations import Migration, MigrationRequest
from controller.admin.plans import HISTORY_LEN, PlanChange
from controller.admin.problems import Problem
from controller.admin.services import Services
from controller.admin.slos import SloChange
from tuner.plan import Plan
from tuner.slo import ClassName, Slo, SloTable

ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": Problem} for status in (401, 404, 409, 422, 502, 503)}

ExpectedVersion = Annotated[
    int | None, Field(ge=0, description="Answer 409 unless this version is in force; absent: write over whatever is")
]


class PutPlan(PlanChange):
    expected_version: ExpectedVersion = None


class PutSlos(SloChange):
    expected_version: ExpectedVersion = None


class Rollback(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=1, description="A version from the history")


def plan_routes(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/v1/plan", tags=["plan"], responses=ERRORS)

    @routes.get("", summary="The plan in force")
    async def get_plan() -> Plan:
        plan = await services.plans.current()
        if plan is None:
            raise HTTPException(404, "No plan has been issued yet; PUT one.")
        return plan

    @routes.put("", summary="Put a plan in force")
    async def put_plan(asked: PutPlan) -> IssuedPlan:
        change = PlanChange(**asked.model_dump(exclude={"expected_version"}))
        return await _answer(services, await services.plans.issue(change, asked.expected_version))

    @routes.get("/history", summary="The last plans, newest first")
    async def history(count: Annotated[int, Query(ge=1, le=HISTORY_LEN)] = HISTORY_LEN) -> PlanHistory:
        return PlanHistory(plans=await services.plans.history(count))

    @routes.post("/rollback", summary="Put an earlier plan in force again, as a new version")
    async def rollback(asked: Rollback) -> IssuedPlan:
        return await _answer(services, await services.plans.rollback(asked.version))

    return routes


async def _answer(services: Services, plan: Plan) -> IssuedPlan:
    live = await services.heartbeats.engines()
    return IssuedPlan(plan=plan, warnings=_warnings(plan, tuple(live)))


def _warnings(plan: Plan, live: Sequence[str]) -> Sequence[str]:
    unknown = [engine_id for engine_id in plan.roles if engine_id not in live]
    known = ", ".join(live) or "none"
    return [f"engine {engine_id!r} has a role but is not live now; live are: {known}" for engine_id in unknown]


def slo_routes(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/v1/slo", tags=["slo"], responses=ERRORS)

    @routes.get("", summary="All classes")
    async def get_slos() -> SloTable:
        return await services.slos.current()

    @routes.put("", summary="Replace the whole table")
    async def put_slos(asked: PutSlos) -> SloTable:
        return await services.slos.replace(SloChange(classes=asked.classes), asked.expected_version)

    @routes.put("/{name}", summary="Add or replace one class")
    async def put_slo(name: ClassName, slo: Slo) -> SloTable:
        return await services.slos.put(name, slo)

    @routes.delete("/{name}", summary="Remove one class; its requests then count as default")
    async def delete_slo(name: str) -> SloTable:
        return await services.slos.remove(name)

    return routes


def fleet_routes(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["fleet"], responses=ERRORS)

    @routes.get("/engines", summary="Live engines, their role and load")
    async def engines() -> EngineList:
        plan = await services.plans.current()
        return EngineList(engines=[engine_view(beat, plan) for beat in (await services.heartbeats.engines()).values()])

    @routes.post("/engines/{engine_id}/drain", summary="Have an engine refuse new work and finish what runs")
    async def drain(engine_id: str) -> DrainAnswer:
        await services.calls.drain(engine_id, on=True)
        return DrainAnswer(engine_id=engine_id, draining=True)

    @routes.post("/engines/{engine_id}/undrain", summary="Have a drained engine take work again")
    async def undrain(engine_id: str) -> DrainAnswer:
        await services.calls.drain(engine_id, on=False)
        return DrainAnswer(engine_id=engine_id, draining=False)

    @routes.get("/routers", summary="Live routers and the plan each has applied")
    async def routers() -> RouterList:
        plan = await services.plans.current()
        version = 0 if plan is None else plan.version
        beats = (await services.heartbeats.routers()).values()
        return RouterList(plan_version=version, routers=[router_view(beat, version) for beat in beats])

    return routes


def migration_routes(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/v1/migrations", tags=["migrations"], responses=ERRORS)

    @routes.post("", summary="Copy a context from one engine's cache to another's; answers when it is there")
    async def migrate(asked: MigrationRequest) -> Migration:
        return await services.migrations.run(asked)

    @routes.get("", summary="The last migrations, newest first")
    async def recent() -> MigrationList:
        return MigrationList(migrations=await services.migrations.recent())

    return routes
