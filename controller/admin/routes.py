"""The admin API's endpoints: thin, each one call into a service."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator

from controller.admin.answers import (
    DecisionPage,
    DrainAnswer,
    EngineList,
    IssuedPlan,
    MigrationList,
    PinnedPlan,
    PlanHistory,
    RouterList,
    engine_view,
    router_view,
)
from controller.admin.explaining import WhyThisPlan, why_this_plan
from controller.admin.forecasts import CannotPredict, Forecaster, WhatIf, WhatIfAnswer
from controller.admin.migrations import Migration, MigrationRequest
from controller.admin.modes import ModeChange, ModeDocument
from controller.admin.plans import HISTORY_LEN, PlanChange
from controller.admin.problems import Problem
from controller.admin.services import Services
from controller.admin.slos import SloChange
from tuner.plan import Plan
from tuner.slo import ClassName, Slo, SloTable
from tuner.types import Mode

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


class PutMode(ModeChange):
    expected_version: ExpectedVersion = None


class Pin(BaseModel):
    """A version from the history, or a plan; neither pins what is in force."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(default=None, ge=1)
    plan: PlanChange | None = None
    by: str = Field(default="operator", min_length=1, max_length=128, description="Who says so")
    reason: str = Field(default="pinned by the operator", min_length=1, max_length=2000)

    @model_validator(mode="after")
    def _one_plan(self) -> Self:
        if self.version is not None and self.plan is not None:
            raise ValueError("version and plan are two plans: give one of them, or none for what is in force")
        return self


class Unpin(BaseModel):
    model_config = ConfigDict(extra="forbid")

    by: str = Field(default="operator", min_length=1, max_length=128, description="Who says so")
    reason: str = Field(default="unpinned by the operator", min_length=1, max_length=2000)


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

    @routes.post("/pin", summary="Put a plan in force and have the tuner leave it alone")
    async def pin(asked: Pin) -> PinnedPlan:
        change = asked.plan if asked.version is None else await services.plans.earlier(asked.version)
        mode, plan = await services.pins.pin(change, asked.by, asked.reason)
        return PinnedPlan(plan=plan, mode=mode, warnings=await _unknown_engines(services, plan))

    @routes.post("/unpin", summary="Give the plan back to the tuner; it stays until a better one is found")
    async def unpin(asked: Unpin) -> ModeDocument:
        return await services.pins.unpin(asked.by, asked.reason)

    return routes


async def _answer(services: Services, plan: Plan) -> IssuedPlan:
    warnings = await _unknown_engines(services, plan)
    mode = await services.modes.current()
    if mode.mode is Mode.AUTO:
        warnings = [*warnings, "mode is 'auto': the tuner may change this plan at any tick; pin it to keep it"]
    return IssuedPlan(plan=plan, warnings=warnings)


async def _unknown_engines(services: Services, plan: Plan) -> Sequence[str]:
    return _warnings(plan, tuple(await services.heartbeats.engines()))


def _warnings(plan: Plan, live: Sequence[str]) -> Sequence[str]:
    unknown = [engine_id for engine_id in plan.roles if engine_id not in live]
    known = ", ".join(live) or "none"
    return [f"engine {engine_id!r} has a role but is not live now; live are: {known}" for engine_id in unknown]


def mode_routes(services: Services) -> APIRouter:
    routes = APIRouter(prefix="/v1/mode", tags=["tuner"], responses=ERRORS)

    @routes.get("", summary="Who moves the plan")
    async def get_mode() -> ModeDocument:
        return await services.modes.current()

    @routes.put("", summary="Say who moves the plan; takes effect at the next tick")
    async def put_mode(asked: PutMode) -> ModeDocument:
        change = ModeChange(**asked.model_dump(exclude={"expected_version"}))
        return await services.modes.put(change, asked.expected_version)

    return routes


def tuner_routes(services: Services, forecaster: Forecaster | None) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["tuner"], responses=ERRORS)

    @routes.get("/decisions", summary="What the tuner decided tick by tick, newest first, with its evidence")
    async def decisions(
        before: Annotated[str | None, Query(pattern=r"^\d+-\d+$", description="Id of a decision")] = None,
        count: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> DecisionPage:
        found = await services.decisions.page(count, before)
        return DecisionPage(decisions=found.decisions, before=found.before)

    @routes.get("/explain", summary="Why this plan: candidates, predictions, and what SLO violations were due to")
    async def explain() -> WhyThisPlan:
        return await why_this_plan(services)

    @routes.post("/what-if", summary="Predict plans or SLOs on the traffic of the last minutes")
    async def what_if(asked: WhatIf) -> WhatIfAnswer:
        if forecaster is None:
            raise CannotPredict("this controller does not tune (TRIMTAB_TUNE is off), so it has no twin: ask another")
        return await forecaster.predict(asked)

    return routes


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
