"""Fixed plans and the threshold rule in the world, which is the reference simulator."""

import numpy as np

from benchmarks.adapt.outcome import Flags, Outcome
from benchmarks.adapt.statics import describe, fixed_plan
from engines.types import Role
from tuner.plan import Plan
from tuner.slo import SloTable
from tuner.twin.forecast import good_requests
from tuner.twin.records import SimulatedRecord
from tuner.twin.reference import ReferenceFleet, simulate_reference, timeline_of
from tuner.twin.types import Fleet
from tuner.types import Candidate
from tuner.workload import Workload

THRESHOLD_TOKENS = 2048
"""Of the rule: a longer uncached prompt is prefilled remotely, and any if the prefill queue is shorter than this."""


def run_fixed(policy: str, candidate: Candidate, workload: Workload, fleet: Fleet, slos: SloTable) -> Outcome:
    """One plan from the first request to the last."""
    timeline = simulate_reference(workload, fleet, fixed_plan(candidate, fleet), slos)
    return Outcome(policy, describe(candidate), good_requests(workload, timeline, slos))


class ThresholdFleet(ReferenceFleet):
    """Decides for each request, on the loads of the moment, whether it is prefilled remotely."""

    def __init__(self, fleet: Fleet, plan: Plan, slos: SloTable) -> None:
        super().__init__(fleet, plan, slos)
        self._long_only = with_min_remote(plan, THRESHOLD_TOKENS)
        self._any = with_min_remote(plan, 0)

    def plan_for_arrival(self) -> Plan:
        queues = [engine.view.pending_prefill_tokens for engine in self.engines if engine.view.role is Role.PREFILL]
        return self._any if min(queues, default=THRESHOLD_TOKENS) < THRESHOLD_TOKENS else self._long_only


def run_threshold(policy: str, candidate: Candidate, workload: Workload, fleet: Fleet, slos: SloTable) -> Outcome:
    """The rule on a split of roles: remote prefill if the uncached prompt is long or the prefill queue is short."""
    world = ThresholdFleet(fleet, fixed_plan(candidate, fleet), slos)
    world.offer(workload)
    return Outcome(policy, describe(candidate), good_rows(world.advance(), world, workload, slos))


def good_rows(records: list[SimulatedRecord], world: ReferenceFleet, workload: Workload, slos: SloTable) -> Flags:
    """Which requests met both bounds, in order of arrival; those that have not ended did not."""
    good = np.zeros(len(workload), dtype=np.bool_)
    ended = np.array(sorted(record.row for record in records), dtype=np.int64)
    good[ended] = good_requests(workload.take(ended), timeline_of(records, world), slos)
    return good


def with_min_remote(plan: Plan, tokens: int) -> Plan:
    return plan.model_copy(update={"knobs": plan.knobs.model_copy(update={"min_remote_tokens": tokens})})
