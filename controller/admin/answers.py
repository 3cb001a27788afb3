"""What the admin API answers, as models that its OpenAPI page shows."""

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, Field

from controller.admin.migrations import Migration
from controller.admin.modes import ModeDocument
from controller.decisions import DecisionRecord
from controller.heartbeats import RouterBeat
from engines.telemetry import Heartbeat
from engines.types import Role
from tuner.plan import Plan


class IssuedPlan(BaseModel):
    plan: Plan
    warnings: Sequence[str] = Field(default=(), description="What is accepted but may not be meant")


class PinnedPlan(IssuedPlan):
    mode: ModeDocument


class DecisionPage(BaseModel):
    decisions: Sequence[DecisionRecord] = Field(description="Newest first")
    before: str | None = Field(description="Give this as `before` for the next page; absent on the last")


class PlanHistory(BaseModel):
    plans: Sequence[Plan] = Field(description="Newest first")


class EngineView(BaseModel):
    engine_id: str
    url: str
    role: Role = Field(description="What the plan in force uses it for")
    info: dict[str, Any]
    load: dict[str, Any]


class EngineList(BaseModel):
    engines: Sequence[EngineView]


class DrainAnswer(BaseModel):
    engine_id: str
    draining: bool


class RouterView(BaseModel):
    router_id: str
    url: str
    plan_version: int
    slo_version: int
    inflight: int
    draining: bool
    workers: int
    up_to_date: bool = Field(description="Whether it has applied the plan in force")


class RouterList(BaseModel):
    plan_version: int = Field(description="The version in force")
    routers: Sequence[RouterView]


class MigrationList(BaseModel):
    migrations: Sequence[Migration] = Field(description="Newest first")


def engine_view(beat: Heartbeat, plan: Plan | None) -> EngineView:
    engine_id = beat.info.engine_id
    return EngineView(
        engine_id=engine_id,
        url=beat.info.url,
        role=Role.MIXED if plan is None else plan.role_of(engine_id),
        info=msgspec.to_builtins(beat.info),
        load=msgspec.to_builtins(beat.load) | {"kv_free_tokens": beat.load.kv_free_tokens},
    )


def router_view(beat: RouterBeat, version: int) -> RouterView:
    return RouterView(**msgspec.structs.asdict(beat), up_to_date=beat.plan_version >= version)
