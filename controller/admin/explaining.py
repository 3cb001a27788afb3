"""Why the plan in force is what it is, put together from what the leader has written down."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, Field

from controller.admin.modes import ModeDocument
from controller.admin.services import Services
from controller.decisions import DecisionRecord
from tuner.decide import describe
from tuner.plan import Plan
from tuner.twin.types import Cause
from tuner.types import Measured, Mode, Prediction

LOOKED_BACK = 50

MOVERS = {
    Mode.AUTO: "the tuner moves the plan",
    Mode.ADVISORY: "the tuner only says what it would do",
    Mode.MANUAL: "an operator's plan is pinned",
    Mode.PAUSED: "nothing is searched or changed",
}


class Violations(BaseModel):
    """Requests that missed their SLO, by what that is put down to."""

    measured: Mapping[Cause, int] = Field(default_factory=dict, description="Of clients' requests, lately")
    predicted: Mapping[Cause, int] = Field(default_factory=dict, description="In simulation, by the last search")


class WhyThisPlan(BaseModel):
    sentences: Sequence[str] = Field(description="The whole answer, for people")
    mode: ModeDocument
    plan: Plan | None
    issued: DecisionRecord | None = Field(description="The decision that put the plan in force, if the tuner did")
    last: DecisionRecord | None = Field(description="The last decision")
    search: DecisionRecord | None = Field(description="The last one with a search: its candidates and predictions")
    violations: Violations


async def why_this_plan(services: Services) -> WhyThisPlan:
    """Raises `StoreUnavailable`."""
    mode, plan = await services.modes.current(), await services.plans.current()
    recent = (await services.decisions.page(LOOKED_BACK)).decisions
    last = recent[0] if recent else None
    search = next((each for each in recent if each.search is not None), None)
    issued = next((each for each in recent if plan and each.published_version == plan.version), None)
    measured = next((each.measured for each in recent if each.measured is not None), None)
    return WhyThisPlan(
        sentences=_sentences(mode, plan, last, search, measured),
        mode=mode,
        plan=plan,
        issued=issued,
        last=last,
        search=search,
        violations=Violations(
            measured={} if measured is None else measured.causes,
            predicted={} if search is None or search.search is None else search.search.incumbent.forecast.causes,
        ),
    )


def _sentences(
    mode: ModeDocument,
    plan: Plan | None,
    last: DecisionRecord | None,
    search: DecisionRecord | None,
    measured: Measured | None,
) -> list[str]:
    said = [f"Mode is {mode.mode}, set by {mode.by} ({mode.reason}): {MOVERS[mode.mode]}."]
    if plan is None:
        return [*said, "No plan has been issued yet."]
    said.append(f"Plan {plan.version}, {plan.pattern}, was issued by {plan.issued_by}: {plan.reason}.")
    if last is None:
        return [*said, "The tuner has decided nothing yet."]
    said.append(f"Its last word was {last.reason}: {last.sentence}.")
    if measured is not None:
        said.append(_measured(measured))
    if search is not None and search.search is not None:
        result = search.search
        said.append(f"Of {result.trials} plans tried, the best is {_predicted(result.ranked[0])}.")
        said.append(f"The plan in force would give {_predicted(result.incumbent)}.")
        said.append(f"The best of those that one would set by hand: {_predicted(result.best_static)}.")
    return said


def _measured(measured: Measured) -> str:
    said = (
        f"Clients got {measured.goodput_rps:.2f} of {measured.offered_rps:.2f} requests/s within their SLO "
        f"over the last {measured.span_s:.0f} s"
    )
    return f"{said}; misses were due to {_causes(measured.causes)}." if measured.causes else f"{said}."


def _predicted(prediction: Prediction) -> str:
    said = (
        f"{describe(prediction.candidate)}, predicted to give {prediction.goodput_rps:.2f} of "
        f"{prediction.offered_rps:.2f} requests/s"
    )
    causes = prediction.forecast.causes
    return f"{said}, with misses due to {_causes(causes)}" if causes else said


def _causes(causes: Mapping[Cause, int]) -> str:
    most_first = sorted(causes.items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{cause.value} ({count})" for cause, count in most_first)
