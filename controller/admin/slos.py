"""Issuing SLO tables, whole or one class at a time."""

from collections.abc import Callable, Mapping

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.admin.documents import Documents
from controller.store.keys import Keys
from controller.store.protocol import Store, VersionConflict
from tuner.plan import BadDocument, explain
from tuner.slo import BOOTSTRAP_SLOS, DEFAULT_CLASS, ClassName, Slo, SloTable

Edit = Callable[[Mapping[str, Slo]], Mapping[str, Slo]]

log = structlog.get_logger(__name__)


class SloChange(BaseModel):
    """A whole table as an operator gives it; the service adds the version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: Mapping[ClassName, Slo] = Field(min_length=1, max_length=16)


class UnknownClass(Exception):
    def __init__(self, name: str, known: Mapping[str, Slo]) -> None:
        super().__init__(f"there is no class {name!r}; known are: {', '.join(sorted(known))}")


class SloService:
    """Every change of SLOs goes through here. All methods raise `StoreUnavailable` when the store does not answer."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._documents = Documents(store, keys.slo, SloTable)

    async def current(self) -> SloTable:
        """The table in force; the bootstrap table (version 0) before the first."""
        return await self._documents.get() or BOOTSTRAP_SLOS

    async def bootstrap(self) -> None:
        """Issue a table where there is none: the last that was seen, if the store lost it, else the very first."""
        if await self._documents.get() is not None:
            return
        last = self._documents.last or BOOTSTRAP_SLOS
        try:
            await self.replace(SloChange(classes=last.classes), expected_version=0)
        except VersionConflict as conflict:
            log.info("SLOs already there", version=conflict.actual)

    async def replace(self, change: SloChange, expected_version: int | None = None) -> SloTable:
        """Put a whole table in force; raises `BadDocument`, or `VersionConflict` if a version was expected."""
        return await self._change(lambda _: change.classes, expected_version)

    async def put(self, name: str, slo: Slo) -> SloTable:
        """Add or replace one class, leaving the others as they are."""
        return await self._change(lambda classes: {**classes, name: slo})

    async def remove(self, name: str) -> SloTable:
        """Remove one class; its requests then count as `default`. Raises `UnknownClass`, `BadDocument`."""
        return await self._change(lambda classes: _without(classes, name))

    async def _change(self, make: Edit, expected_version: int | None = None) -> SloTable:
        def table(current: SloTable | None, version: int) -> SloTable:
            return _table(make((current or BOOTSTRAP_SLOS).classes), version)

        issued = await self._documents.change(table, expected_version)
        log.info("SLOs issued", version=issued.version, classes=sorted(issued.classes))
        return issued


def _table(classes: Mapping[str, Slo], version: int) -> SloTable:
    try:
        return SloTable(version=version, classes=classes)
    except ValidationError as error:
        raise BadDocument(explain(error)) from error


def _without(classes: Mapping[str, Slo], name: str) -> Mapping[str, Slo]:
    if name not in classes:
        raise UnknownClass(name, classes)
    if name == DEFAULT_CLASS:
        raise BadDocument(f"class {name!r} cannot be removed: requests without x-slo-class get it")
    return {kept: slo for kept, slo in classes.items() if kept != name}
