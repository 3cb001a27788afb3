"""Who moves the plan: a versioned document, so that it is known who said so, when and why."""

from collections.abc import Callable

import structlog
from pydantic import BaseModel, ConfigDict, Field

from controller.admin.documents import Documents
from controller.store.keys import Keys
from controller.store.protocol import Store, VersionConflict
from tuner.types import Mode

REASON_CHARS = 2000

log = structlog.get_logger(__name__)


class ModeChange(BaseModel):
    """What an operator asks for; the service adds version and time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = Field(
        description="`auto`: the tuner changes plans; `advisory`: it only says what it would do; "
        "`manual`: an operator's plan is pinned; `paused`: it does not even search"
    )
    by: str = Field(default="operator", min_length=1, max_length=128, description="Who says so")
    reason: str = Field(default="set by the operator", min_length=1, max_length=REASON_CHARS)


class ModeDocument(ModeChange):
    """The mode in force."""

    version: int = Field(ge=0)
    at_s: float = Field(ge=0, description="Unix time")


BOOTSTRAP_MODE = ModeDocument(version=0, at_s=0, mode=Mode.AUTO, by="bootstrap", reason="nobody has said otherwise")


class ModeService:
    """Every change of the mode goes through here. Methods raise `StoreUnavailable` when the store does not answer."""

    def __init__(self, store: Store, keys: Keys, now_s: Callable[[], float]) -> None:
        self._documents = Documents(store, keys.mode, ModeDocument)
        self._now_s = now_s

    async def current(self) -> ModeDocument:
        """The mode in force; `auto` before anybody has said anything."""
        return await self._documents.get() or BOOTSTRAP_MODE

    async def bootstrap(self) -> None:
        """Issue a mode where there is none: the last that was seen, if the store lost it, else `auto`."""
        if await self._documents.get() is not None:
            return
        last = self._documents.last or BOOTSTRAP_MODE
        try:
            await self.put(ModeChange(mode=last.mode, by=last.by, reason=last.reason), expected_version=0)
        except VersionConflict as conflict:
            log.info("mode already there", version=conflict.actual)

    async def put(self, change: ModeChange, expected_version: int | None = None) -> ModeDocument:
        """Put a mode in force, from the next tick on; raises `VersionConflict` if a version was expected."""
        document = await self._documents.change(
            lambda _, version: ModeDocument(version=version, at_s=self._now_s(), **dict(change)), expected_version
        )
        log.info("mode set", mode=document.mode, by=document.by, reason=document.reason, version=document.version)
        return document
