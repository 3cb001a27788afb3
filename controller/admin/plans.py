"""Issuing plans: what an operator may change, history, and going back."""

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.admin.documents import Documents
from controller.admin.patterns import KnownPatterns
from controller.store.keys import Keys
from controller.store.protocol import Lease, Store, StoreUnavailable, VersionConflict
from engines.types import Role
from tuner.plan import (
    BOOTSTRAP_PLAN,
    MOST_REPLICAS,
    BadDocument,
    HotPrefix,
    IssuedBy,
    Knobs,
    Name,
    Plan,
    explain,
    parse,
)

HISTORY_LEN = 100
REASON_CHARS = 2000

log = structlog.get_logger(__name__)


class PlanChange(BaseModel):
    """What somebody wants in force. The service adds version, time and author."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: Name = Field(description="Name of a pattern, e.g. `data_parallel`, `disaggregated`, `balanced`")
    knobs: Knobs = Knobs()
    roles: Mapping[Name, Role] = Field(default_factory=dict, description="Engine id → role; others are `mixed`")
    reason: str = Field(default="set by the operator", min_length=1, max_length=REASON_CHARS)
    replicas: tuple[HotPrefix, ...] = Field(
        default=(), max_length=MOST_REPLICAS, description="Contexts to be copied to the engines named with each"
    )


class UnknownPattern(Exception):
    """The plan names a pattern that is not installed here."""

    def __init__(self, pattern: str, known: Sequence[str]) -> None:
        super().__init__(f"there is no pattern {pattern!r}; known are: {', '.join(known) or 'none'}")


class UnknownVersion(Exception):
    """The plan to go back to is not among those kept."""

    def __init__(self, version: int, kept: Collection[int]) -> None:
        known = f"kept are {min(kept)} to {max(kept)}" if kept else "none has been issued yet"
        super().__init__(f"there is no plan of version {version}: {known}")


class PlanService:
    """Every change of the plan goes through here.

    The plan's version is the store's own, so two writers can never issue the same version. All methods raise
    `StoreUnavailable` when the store does not answer.
    """

    def __init__(self, store: Store, keys: Keys, now_s: Callable[[], float], known: KnownPatterns) -> None:
        self._store = store
        self._keys = keys
        self._now_s = now_s
        self._known = known
        self._documents = Documents(store, keys.plan, Plan)

    async def current(self) -> Plan | None:
        """The plan in force, or `None` before the first; `BadDocument` if what is stored is no plan."""
        return await self._documents.get()

    async def bootstrap(self) -> None:
        """Issue a plan where there is none: the last that was seen, if the store lost it, else the very first."""
        if await self._documents.get() is not None:
            return
        last = self._documents.last or BOOTSTRAP_PLAN
        reason = f"the store had lost version {last.version}: {last.reason}" if last.version else last.reason
        change = _again(last, reason)
        try:
            await self.issue(change, expected_version=0, issued_by=last.issued_by)
        except VersionConflict as conflict:
            log.info("plan already there", version=conflict.actual)

    def check(self, change: PlanChange) -> None:
        """Raises `UnknownPattern` or `BadDocument` for what cannot be a plan."""
        known = self._known()
        if change.pattern not in known:
            raise UnknownPattern(change.pattern, known)
        self._plan(change, version=1, issued_by=IssuedBy.OPERATOR)

    async def issue(
        self,
        change: PlanChange,
        expected_version: int | None = None,
        issued_by: IssuedBy = IssuedBy.OPERATOR,
        fence: Lease | None = None,
    ) -> Plan:
        """Put a plan in force; raises `UnknownPattern`, `BadDocument`, or `VersionConflict` if one was expected.

        With a `fence` only the holder of that lease can, else `LostLease`.
        """
        self.check(change)
        plan = await self._documents.change(
            lambda _, version: self._plan(change, version, issued_by), expected_version, fence
        )
        log.info("plan issued", version=plan.version, pattern=plan.pattern, issued_by=issued_by, reason=plan.reason)
        await self._remember(plan)
        return plan

    async def issue_as_tuner(self, change: PlanChange, expected_version: int, lease: Lease) -> Plan:
        """The tuner's way to put a plan in force: only over the plan it decided on, and only while it leads."""
        return await self.issue(change, expected_version, IssuedBy.TUNER, lease)

    async def rollback(self, version: int) -> Plan:
        """Put the content of an earlier plan in force again, as a new version; raises `UnknownVersion`."""
        return await self.issue(await self.earlier(version))

    async def earlier(self, version: int) -> PlanChange:
        """What it takes to go back to an earlier plan; raises `UnknownVersion`."""
        kept = {plan.version: plan for plan in await self.history()}
        if version not in kept:
            raise UnknownVersion(version, kept)
        old = kept[version]
        return _again(old, f"rolled back to version {version}: {old.reason}")

    async def history(self, count: int = HISTORY_LEN) -> Sequence[Plan]:
        """The last plans, newest first."""
        entries = await self._store.latest(self._keys.plans, count)
        kept = {plan.version: plan for plan in (_readable(entry.value) for entry in entries) if plan is not None}
        current = await self.current()
        if current is not None:
            kept[current.version] = current
        return sorted(kept.values(), key=lambda plan: plan.version, reverse=True)[:count]

    def _plan(self, change: PlanChange, version: int, issued_by: IssuedBy) -> Plan:
        try:
            return Plan(version=version, issued_at_s=self._now_s(), issued_by=issued_by, **dict(change))
        except ValidationError as error:
            raise BadDocument(explain(error)) from error

    async def _remember(self, plan: Plan) -> None:
        try:
            await self._store.append(self._keys.plans, [plan.model_dump_json().encode()], HISTORY_LEN)
        except StoreUnavailable as error:
            # The plan is in force by now, so failing the call would be a lie: only the history has a gap.
            log.warning("plan missing from history", version=plan.version, error=str(error))


def _again(plan: Plan, reason: str) -> PlanChange:
    """The content of a plan, to be issued once more."""
    return PlanChange(
        pattern=plan.pattern,
        knobs=plan.knobs,
        roles=plan.roles,
        reason=reason[:REASON_CHARS],
        replicas=plan.replicas,
    )


def _readable(raw: bytes) -> Plan | None:
    try:
        return parse(Plan, raw)
    except BadDocument:
        return None
