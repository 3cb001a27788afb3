"""Both evaluations in the reference simulator: how requests are placed, and what becomes of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from engines.types import Role
from tuner.plan import DATA_PARALLEL, IssuedBy, Knobs, Plan
from tuner.slo import BOOTSTRAP_SLOS
from tuner.twin.reference import ReferenceFleet, timeline_of
from tuner.twin.reference_call import Call
from tuner.twin.types import Ending, Fleet, Timeline
from tuner.workload import Workload

TRANSFERS = 1024
"""Neither system that is simulated again bounds the transfers to an engine."""


class FewestRunning(ReferenceFleet):
    """Data parallel by the fewest requests under way, which no policy of a plan is: waiting prompts count for nothing.

    Placement never decodes on an engine whose role is prefill, so that every engine but the chosen one has that role.
    """

    def plan_for_arrival(self) -> Plan:
        chosen = min(self.engines, key=lambda engine: engine.own_inflight)
        for engine in self.engines:
            engine.view.role = Role.MIXED if engine is chosen else Role.PREFILL
        return super().plan_for_arrival()


def make_plan(pattern: str, roles: Mapping[str, Role], offload_ratio: float = 0.0) -> Plan:
    knobs: dict[str, Any] = {"offload_ratio": offload_ratio, "max_inflight_transfers": TRANSFERS}
    return Plan(
        version=1,
        issued_at_s=0,
        issued_by=IssuedBy.OPERATOR,
        reason="a published evaluation",
        pattern=pattern,
        knobs=Knobs(**knobs),
        roles=roles,
    )


def simulated(workload: Workload, fleet: Fleet, plan: Plan) -> Timeline:
    """What became of each request. No bound matters: nothing is shed."""
    return _run(workload, fleet, plan)[0]


def simulated_from_prefill(workload: Workload, fleet: Fleet, plan: Plan) -> Timeline:
    """The same where the prefill engine answers with the first token: TTFT ends there, and the hand-off is in TPOT.

    Here the decode engine makes the first token, in the pass for the prompt's last token; that pass then counts as a
    step more. What waits for room on the decode engine does so before its prefill, so that this is in TTFT.
    """
    timeline, calls = _run(workload, fleet, plan, keep_samples=True)
    prefilled_s = np.array([np.nan if call.sent_s is None else call.sent_s - call.arrived_s for call in calls])
    split = ~np.isnan(prefilled_s) & (timeline.ending == Ending.OK)
    gaps = np.array([call.output_tokens - 1 if call.output_tokens > 1 else np.nan for call in calls])
    return replace(
        timeline,
        ttft_s=np.where(split, prefilled_s, timeline.ttft_s),
        tpot_s=np.where(split, (timeline.e2e_s - prefilled_s) / gaps, timeline.tpot_s),
    )


def _run(workload: Workload, fleet: Fleet, plan: Plan, keep_samples: bool = False) -> tuple[Timeline, list[Call]]:
    """Requests in order of arrival; no calls unless samples are kept."""
    kind = FewestRunning if plan.pattern == DATA_PARALLEL else ReferenceFleet
    world = kind(fleet, plan, BOOTSTRAP_SLOS, keep_samples=keep_samples)
    world.offer(workload)
    return timeline_of(world.advance(), world), world.take_arrivals()
