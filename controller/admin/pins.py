"""Pinning: an operator's plan that the tuner leaves alone. A pin is a plan and the mode `manual`; nothing else."""

from controller.admin.modes import ModeChange, ModeDocument, ModeService
from controller.admin.plans import PlanChange, PlanService
from tuner.plan import Plan
from tuner.types import Mode


class NothingToPin(Exception):
    def __init__(self) -> None:
        super().__init__("no plan is in force yet that could be pinned: give one")


class PinService:
    """All methods raise `StoreUnavailable` when the store does not answer."""

    def __init__(self, plans: PlanService, modes: ModeService) -> None:
        self._plans = plans
        self._modes = modes

    async def pin(self, change: PlanChange | None, by: str, reason: str) -> tuple[ModeDocument, Plan]:
        """Put a plan in force and keep it; without one, keep what is in force.

        The mode comes first: from then on the tuner puts nothing in force that would come after the pinned plan.
        Raises `UnknownPattern` or `BadDocument` for what cannot be a plan, or `NothingToPin`; nothing has changed then.
        """
        if change is not None:
            self._plans.check(change)
        elif await self._plans.current() is None:
            raise NothingToPin
        mode = await self._modes.put(ModeChange(mode=Mode.MANUAL, by=by, reason=reason))
        plan = await self._plans.current() if change is None else await self._plans.issue(change)
        if plan is None:
            raise NothingToPin
        return mode, plan

    async def unpin(self, by: str, reason: str) -> ModeDocument:
        """Give the plan back to the tuner. What is in force stays until it finds a better one."""
        return await self._modes.put(ModeChange(mode=Mode.AUTO, by=by, reason=reason))
