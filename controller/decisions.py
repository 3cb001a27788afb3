"""What each tick decided, with its evidence, as a stream in the store: written by the leader, read by everybody."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controller.store.protocol import Entry, Store
from tuner.types import Candidate, Decision, Measured, Mode, Prediction, Reason, SearchResult

KEPT = 1_000
CANDIDATES = 8
"""Best candidates kept as evidence; the plan in force and the best static one come besides."""
QUIET_S = 60.0
"""Ticks that find nothing new are written down this often."""

log = structlog.get_logger(__name__)


class DecisionRecord(BaseModel):
    """One tick."""

    model_config = ConfigDict(frozen=True)

    id: str | None = Field(default=None, description="Position in the stream; pages go on before it")
    at_s: float = Field(description="Unix time")
    controller_id: str
    mode: Mode
    reason: Reason
    sentence: str = Field(description="What was seen, and what was done or refused")
    plan_version: int = Field(description="In force when it was decided")
    published_version: int | None = Field(default=None, description="The plan that the decision put in force")
    refused: str | None = Field(default=None, description="Why a plan that was decided on did not come into force")
    chosen: Candidate | None = Field(default=None, description="What to put in force")
    proposed: Candidate | None = Field(default=None, description="What would have been, if the mode had let it")
    promise: Prediction | None = Field(default=None, description="What the chosen or proposed plan is expected to give")
    search: SearchResult | None = Field(default=None, description="The candidates, best first, with their predictions")
    measured: Measured | None = Field(default=None, description="What clients got from the plan in force")
    drifted: Sequence[str] = Field(default=(), description="Features of the traffic that moved")
    tick_s: float = Field(description="Of the whole tick")

    def repeats(self, earlier: "DecisionRecord") -> bool:
        """Whether it says nothing that the earlier one did not say."""
        said = (self.reason, self.mode, self.plan_version, self.controller_id)
        news = self.search is not None or self.published_version is not None or self.refused is not None
        return not news and said == (earlier.reason, earlier.mode, earlier.plan_version, earlier.controller_id)


def record_of(decision: Decision, **circumstances: object) -> DecisionRecord:
    """A decision and its `circumstances`: when, by whom, in which mode, over which plan."""
    return DecisionRecord(
        reason=decision.reason,
        sentence=decision.sentence,
        chosen=decision.chosen,
        proposed=decision.proposed,
        promise=decision.promise,
        search=None if decision.considered is None else _evidence(decision.considered),
        measured=decision.measured,
        drifted=tuple(decision.drifted),
        **circumstances,
    )


class DecisionLog:
    """The stream `decisions`. Every method raises `StoreUnavailable` when the store does not answer."""

    def __init__(self, store: Store, stream: str) -> None:
        self._store = store
        self._stream = stream
        self._written: DecisionRecord | None = None

    async def write(self, record: DecisionRecord) -> None:
        """Keep a decision; one that repeats the last is kept once a minute."""
        last = self._written
        if last is not None and record.repeats(last) and record.at_s - last.at_s < QUIET_S:
            return
        await self._store.append(self._stream, [record.model_dump_json().encode()], KEPT)
        self._written = record

    async def page(self, count: int, before: str | None = None) -> "Page":
        """The last `count` decisions, of those before the id `before` if it is given."""
        entries = await self._store.latest(self._stream, count, before)
        records = [record for entry in reversed(entries) if (record := _readable(entry)) is not None]
        return Page(records, entries[0].id if len(entries) == count else None)


class Page(NamedTuple):
    decisions: Sequence[DecisionRecord]
    """Newest first."""
    before: str | None
    """Where the next page begins; `None` on the last."""


def _evidence(result: SearchResult) -> SearchResult:
    return replace(result, ranked=tuple(result.ranked[:CANDIDATES]))


def _readable(entry: Entry) -> DecisionRecord | None:
    """`None` for what another version wrote."""
    try:
        record = DecisionRecord.model_validate_json(entry.value)
    except ValidationError:
        log.debug("decision of another version left out", id=entry.id)
        return None
    return record.model_copy(update={"id": entry.id})
