"""What the tuner remembers from tick to tick. Immutable; travels as JSON, so that a new leader goes on where it was."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from tuner.corrections import Corrections
from tuner.types import Candidate, Reason

MOST_WINNERS = 32


@dataclass(frozen=True, slots=True)
class Promise:
    """What a published plan is held to until its probation ends."""

    candidate: Candidate
    good_share: float
    """Of offered requests, as predicted and corrected."""
    predicted_share: float
    """The same before it was corrected, for the corrections to learn from."""
    offered_rps: float
    made_at_s: float
    previous: Candidate | None
    """What to go back to; `None` if the traffic moved and what was before is no alternative."""


@dataclass(frozen=True, slots=True)
class Barred:
    candidate: Candidate
    until_s: float


@dataclass(frozen=True, slots=True)
class Winner:
    """What was best for traffic with these features."""

    features: tuple[float, ...]
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class TunerState:
    regime_since_s: float | None = None
    """Unix time since when the traffic has been of one kind; `None` before any was seen."""
    moved: tuple[str, ...] = ()
    """Features whose shift began the regime."""
    trigger: Reason | None = None
    """Why the next search cannot wait, until one was decided on."""
    changed_at_s: float | None = None
    """When the tuner last changed the plan."""
    searched_at_s: float | None = None
    expected_share: float | None = None
    """Of offered requests that the last search predicted to be good under the plan in force."""
    promise: Promise | None = None
    barred: tuple[Barred, ...] = ()
    rival: Candidate | None = None
    """Looked better in the last search, but once is not enough while nothing moves."""
    winners: tuple[Winner, ...] = ()
    corrections: Corrections = field(default_factory=Corrections)
    learnt_at_s: float | None = None
    """When the corrections last learnt of what clients got."""
    slo_version: int | None = None
    engine_ids: tuple[str, ...] = ()
    searches: int = 0


_ADAPTER = TypeAdapter(TunerState)


def dump(state: TunerState) -> bytes:
    return _ADAPTER.dump_json(state)


def load(raw: bytes) -> TunerState:
    """Raises `ValueError` for what is no state, e.g. of another version."""
    return _ADAPTER.validate_json(raw)


def nearest_winners(winners: Sequence[Winner], features: Sequence[float], most: int) -> list[Candidate]:
    """Winners for the most similar traffic, each once."""
    comparable = [winner for winner in winners if len(winner.features) == len(features)]

    def distance(winner: Winner) -> float:
        return sum((one - other) ** 2 for one, other in zip(winner.features, features, strict=True))

    return list(dict.fromkeys(winner.candidate for winner in sorted(comparable, key=distance)))[:most]
