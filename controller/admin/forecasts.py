"""What-if: what a plan or other SLOs would have made of the traffic of the last minutes, by simulation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from controller import search_jobs
from controller.admin.plans import PlanChange
from controller.search_worker import SearchWorker
from engines.types import Role
from tuner.candidates import assign_roles, candidate_of
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, BadDocument, Knobs, Name, Plan, explain
from tuner.slo import ClassName, Slo, SloTable
from tuner.twin.types import Forecast
from tuner.types import EngineState, Observation

LIMIT_S = 60.0
MOST_PLANS = 24

Ratio = Annotated[float, Field(ge=0, lt=1)]


class WhatIf(BaseModel):
    """Changes to what is in force; whatever is left out stays. Without any, the plan in force is predicted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: Name | None = None
    knobs: Mapping[str, Any] = Field(default_factory=dict, description="Knobs that differ from those in force")
    roles: Mapping[Name, Role] | None = Field(default=None, description="Engine id → role; others are `mixed`")
    prefill_engines: int | None = Field(
        default=None, ge=1, description="Instead of roles: so many engines prefill, the others decode"
    )
    slos: Mapping[ClassName, Slo] = Field(default_factory=dict, max_length=16, description="Classes that differ")
    offload_ratios: Sequence[Ratio] = Field(
        default=(), max_length=MOST_PLANS, description="Predict one plan for each of these offload ratios"
    )

    @model_validator(mode="after")
    def _one_way_to_give_roles(self) -> Self:
        if self.roles is not None and self.prefill_engines is not None:
            raise ValueError("roles and prefill_engines both say what engines do: give one of them")
        return self

    @property
    def changes_something(self) -> bool:
        return self != WhatIf()


class PredictedPlan(BaseModel):
    label: str
    plan: PlanChange
    forecast: Forecast


class Traffic(BaseModel):
    """What the forecasts are made for."""

    until_s: float = Field(description="Unix time at which it ends")
    span_s: float
    requests: int
    rate_rps: float
    mean_prompt_tokens: float
    mean_output_tokens: float


class WhatIfAnswer(BaseModel):
    traffic: Traffic
    engines: int
    slos: SloTable = Field(description="That the variants are judged by")
    in_force: PredictedPlan = Field(description="The plan in force, judged by the SLOs in force")
    variants: Sequence[PredictedPlan]


class CannotPredict(Exception):
    """There is nothing to predict from; the message says what is lacking."""


class Knows(Protocol):
    """Where the last observation is found."""

    @property
    def observation(self) -> Observation | None: ...

    @property
    def worker(self) -> SearchWorker: ...


class Forecaster:
    """Runs in this controller's search worker, after a search that is under way.

    Raises `CannotPredict`, `BadDocument` for a change that makes no plan, `UnknownPattern`, and `WorkerFailed`.
    """

    def __init__(self, knows: Knows, check: Callable[[PlanChange], None]) -> None:
        self._knows = knows
        self._check = check

    async def predict(self, asked: WhatIf) -> WhatIfAnswer:
        observation = _usable(self._knows.observation)
        variants = _variants(asked, observation)
        for _, plan in variants:
            self._check(_change_of(plan))
        slos = _slos(asked, observation.slos)
        (now,) = await self._run(observation, observation.slos, [observation.plan])
        found = await self._run(observation, slos, [plan for _, plan in variants])
        return WhatIfAnswer(
            traffic=_traffic(observation),
            engines=sum(not engine.draining for engine in observation.engines),
            slos=slos,
            in_force=_predicted("in force", observation.plan, now),
            variants=[
                _predicted(label, plan, forecast) for (label, plan), forecast in zip(variants, found, strict=True)
            ],
        )

    async def _run(self, observation: Observation, slos: SloTable, plans: Sequence[Plan]) -> Sequence[Forecast]:
        if not plans:
            return ()
        return await self._knows.worker.run(
            LIMIT_S, search_jobs.what_if, observation.workload, observation.engines, slos, plans
        )


def _usable(observation: Observation | None) -> Observation:
    if observation is None:
        raise CannotPredict("this controller has not observed anything yet: try again after its next tick")
    if not any(not engine.draining for engine in observation.engines):
        raise CannotPredict("no engine is live that a plan could use")
    if not len(observation.workload):
        raise CannotPredict("no request has arrived in the last minutes, so there is no traffic to predict for")
    return observation


def _variants(asked: WhatIf, observation: Observation) -> list[tuple[str, Plan]]:
    """Labels and plans; raises `BadDocument`."""
    if not asked.changes_something:
        return []
    if not asked.offload_ratios:
        return [("asked", _plan(asked, observation, asked.pattern, {}))]
    return [
        (f"offload ratio {ratio:g}", _plan(asked, observation, _pattern_of(ratio), {"offload_ratio": ratio}))
        for ratio in asked.offload_ratios
    ]


def _pattern_of(ratio: float) -> str:
    return BALANCED if ratio > 0 else DISAGGREGATED


def _plan(asked: WhatIf, observation: Observation, pattern: str | None, knobs: Mapping[str, Any]) -> Plan:
    now = observation.plan
    pattern = pattern or now.pattern
    kept = now.knobs.model_dump()
    if pattern != now.pattern:
        # Only `balanced` has an offload ratio; another pattern starts without.
        kept.pop("offload_ratio")
    try:
        return Plan(
            version=now.version,
            issued_at_s=now.issued_at_s,
            issued_by=now.issued_by,
            reason="what if",
            pattern=pattern,
            knobs=Knobs(**kept | dict(asked.knobs) | dict(knobs)),
            roles=_roles(asked, pattern, observation.engines, now),
        )
    except ValidationError as error:
        raise BadDocument(explain(error)) from error


def _roles(asked: WhatIf, pattern: str, engines: Sequence[EngineState], now: Plan) -> Mapping[str, Role]:
    if asked.roles is not None:
        return asked.roles
    if asked.prefill_engines is None:
        return now.roles
    if asked.prefill_engines >= len(engines):
        raise BadDocument(
            f"prefill_engines: {asked.prefill_engines} of {len(engines)} engines would leave none to decode"
        )
    if pattern == DATA_PARALLEL:
        raise BadDocument("prefill_engines: 'data_parallel' has no prefill engines; name another pattern")
    decode = len(engines) - asked.prefill_engines
    wanted = replace(
        candidate_of(now, engines), prefill_engines=asked.prefill_engines, decode_engines=decode, mixed_engines=0
    )
    return assign_roles(wanted, engines, now.roles)


def _slos(asked: WhatIf, now: SloTable) -> SloTable:
    return SloTable(version=now.version, classes={**now.classes, **asked.slos})


def _predicted(label: str, plan: Plan, forecast: Forecast) -> PredictedPlan:
    return PredictedPlan(label=label, plan=_change_of(plan), forecast=forecast)


def _change_of(plan: Plan) -> PlanChange:
    return PlanChange(
        pattern=plan.pattern, knobs=plan.knobs, roles=plan.roles, reason=plan.reason, replicas=plan.replicas
    )


def _traffic(observation: Observation) -> Traffic:
    workload = observation.workload
    return Traffic(
        until_s=observation.now_s,
        span_s=workload.span_s,
        requests=len(workload),
        rate_rps=workload.rate_rps,
        mean_prompt_tokens=float(workload.prompt_tokens.mean()),
        mean_output_tokens=float(workload.output_tokens.mean()),
    )
