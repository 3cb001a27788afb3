"""The tuner as its owner sees it: prepare, search (elsewhere), decide, draft. Holds the state between ticks."""

from dataclasses import dataclass, replace
from typing import Self

from engines.types import Role
from tuner import state as states
from tuner.candidates import assign_roles, candidate_of
from tuner.decide import decide
from tuner.hot_prefixes import carried, holders
from tuner.plan import HotPrefix, Knobs, Plan
from tuner.prepare import prepare, remember
from tuner.settings import TunerSettings
from tuner.state import Promise, TunerState
from tuner.task import SearchTask
from tuner.types import CHANGES, Candidate, Decision, Mode, Observation, SearchResult


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """What a decision wants published; version, time and author are the publisher's."""

    pattern: str
    knobs: Knobs
    roles: dict[str, Role]
    reason: str
    replicas: tuple[HotPrefix, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the plan is what it is: the last search and what came of it."""

    decision: Decision
    search: SearchResult


class Tuner:
    """Not thread-safe. A tick is `prepare`, then `search` if there is a task, then `decide`."""

    def __init__(self, settings: TunerSettings, state: TunerState | None = None) -> None:
        self.settings = settings
        self._state = state or TunerState()
        self._explanation: Explanation | None = None

    @classmethod
    def restore(cls, settings: TunerSettings, raw: bytes) -> Self:
        """Go on from another tuner's `state()`. Raises `ValueError` for what is no state."""
        return cls(settings, states.load(raw))

    def state(self) -> bytes:
        return states.dump(self._state)

    def explanation(self) -> Explanation | None:
        """Of the last tick that searched."""
        return self._explanation

    def measured_since_s(self, plan: Plan) -> float:
        """From which arrival on (Unix time) requests show what the plan in force does to the present traffic."""
        return max(plan.issued_at_s, self._state.regime_since_s or 0.0) + self.settings.settle_s

    def prepare(self, observation: Observation) -> SearchTask | None:
        """The search that this tick needs, if any."""
        self._state, task = prepare(self._state, observation, self.settings)
        return task

    def decide(self, observation: Observation, result: SearchResult | None, mode: Mode) -> Decision:
        self._state, decision = decide(self._state, observation, result, mode, self.settings)
        if result is not None:
            self._explanation = Explanation(decision, result)
            self._state = remember(self._state, observation, result.ranked[0].candidate)
        return decision

    @staticmethod
    def draft(decision: Decision, observation: Observation) -> PlanDraft:
        """The plan that a decision asks for. Raises `ValueError` if it asks for none."""
        if decision.chosen is None:
            raise ValueError(f"the decision '{decision.reason}' changes nothing")
        chosen = decision.chosen
        roles = assign_roles(chosen, observation.usable, observation.plan.roles)
        replicas = carried(decision.replicas, observation.plan, observation.hot, holders(observation.usable, roles))
        return PlanDraft(chosen.pattern, chosen.knobs, roles, f"{decision.reason}: {decision.sentence}", replicas)

    def published(self, version: int, decision: Decision, observation: Observation, now_s: float) -> None:
        """The plan of a decision is in force now: hold it to its promise."""
        promise = _promise(decision, self._proven(observation, now_s), now_s)
        self._state = replace(self._state, changed_at_s=now_s, promise=promise)

    def _proven(self, observation: Observation, now_s: float) -> Candidate | None:
        """The plan that is replaced, if it has served the present traffic for long enough to go back to."""
        state = self._state
        if state.regime_since_s is None:
            return None
        since_s = max(state.regime_since_s, observation.plan.issued_at_s)
        known = now_s - since_s >= self.settings.probation_s
        return candidate_of(observation.plan, observation.usable) if known else None


def _promise(decision: Decision, previous: Candidate | None, now_s: float) -> Promise | None:
    expected = decision.promise
    if expected is None or decision.reason not in CHANGES or expected.offered_rps <= 0:
        return None
    return Promise(
        candidate=expected.candidate,
        good_share=expected.goodput_rps / expected.offered_rps,
        predicted_share=expected.forecast.goodput_rps / max(expected.forecast.offered_rps, 1e-9),
        offered_rps=expected.offered_rps,
        made_at_s=now_s,
        previous=previous,
    )
