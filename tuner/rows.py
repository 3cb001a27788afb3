"""The requests of a window, as rows of one array: bounded, found by request id, the oldest giving way."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engines.records import Outcome
from tuner.sharing import LEVELS
from tuner.workload import Floats, Ints

OPEN = -1
"""Ending of a request of which no record came yet."""
VOID = -2
"""Ending of a request whose record made no sense: it was demand, but nothing is known of how it fared."""
OUTCOMES = tuple(Outcome)
"""Other endings are indices into this."""
OK = OUTCOMES.index(Outcome.OK)

Rows = NDArray[np.void]

ROW = np.dtype(
    [
        ("arrived_s", np.float64),
        ("estimated_tokens", np.float64),
        ("prompt_tokens", np.float64),
        ("prompt_bytes", np.float64),
        ("output_tokens", np.float64),
        ("cached_tokens", np.float64),
        ("ttft_s", np.float64),
        ("tpot_s", np.float64),
        ("e2e_s", np.float64),
        ("plan_version", np.int64),
        ("slo_class", np.int64),
        ("ending", np.int8),
        ("ttft_cause", np.int8),
        ("tpot_cause", np.int8),
        ("announced", np.bool_),
        ("expected", np.bool_),
        ("warming", np.bool_),
        ("depth", np.int64),
        ("sketch", np.uint64, (LEVELS,)),
    ]
)
"""Times are Unix seconds. NaN is unknown.

`announced`: its arrival was seen, not only its end; `expected`: it should have been.
"""


def blank(count: int) -> Rows:
    """Rows of which nothing is known."""
    rows = np.zeros(count, dtype=ROW)
    for name in ROW.names or ():
        if ROW[name] == np.float64:
            rows[name] = np.nan
    rows["ending"] = OPEN
    return rows


def last_of_each(rows: Rows, most: int) -> Rows:
    """Of each class the rows that arrived last, `most` at most, in order of arrival."""
    rows = rows[np.argsort(rows["arrived_s"], kind="stable")]
    places = [np.flatnonzero(rows["slo_class"] == name)[-most:] for name in np.unique(rows["slo_class"])]
    return rows[np.sort(np.concatenate(places))] if places else rows


class RowStore:
    """Keeps at most `capacity` rows."""

    def __init__(self, capacity: int) -> None:
        self._rows = blank(capacity)
        self._held = np.zeros(capacity, dtype=np.bool_)
        self._ids: list[str | None] = [None] * capacity
        self._slot_of: dict[str, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot_of(self, request_id: str) -> int | None:
        return self._slot_of.get(request_id)

    @property
    def all(self) -> Rows:
        """A copy of all rows, in no order."""
        return self._rows[self._held]

    def at(self, slots: Sequence[int] | Ints, name: str) -> NDArray[np.generic]:
        return self._rows[name][np.asarray(slots, dtype=np.int64)]

    def put(self, slots: Sequence[int] | Ints, values: Rows, names: Sequence[str]) -> None:
        """Overwrite some columns of rows that are there."""
        for name in names:
            self._rows[name][slots] = values[name]

    def void(self, slots: Sequence[int]) -> None:
        self._rows["ending"][list(slots)] = VOID

    def add(self, request_ids: Sequence[str], rows: Rows) -> Rows:
        """Add rows whose ids are new and all different; those that had to give way, which may be new ones."""
        capacity = len(self._ids)
        too_many = rows[: max(0, len(rows) - capacity)]
        request_ids, rows = request_ids[-capacity:], rows[-capacity:]
        slots = (self._next + np.arange(len(rows))) % capacity
        pushed_out = self._free(slots[self._held[slots]])
        self._rows[slots] = rows
        self._held[slots] = True
        for slot, request_id in zip(slots.tolist(), request_ids, strict=True):
            self._ids[slot] = request_id
            self._slot_of[request_id] = slot
        self._next = (self._next + len(rows)) % capacity
        return np.concatenate([too_many, pushed_out])

    def expire(self, before_s: float) -> Rows:
        """Drop what arrived earlier than that; the rows that went."""
        return self._free(np.flatnonzero(self._held & (self._rows["arrived_s"] < before_s)))

    def _free(self, slots: Ints) -> Rows:
        gone = self._rows[slots]
        self._held[slots] = False
        for slot in slots.tolist():
            self._slot_of.pop(self._ids[slot] or "", None)
            self._ids[slot] = None
        return gone


def numbers(values: Sequence[float | None]) -> Floats:
    """A column; `None` becomes NaN, and what no float can hold infinity."""
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        return np.array([_number(value) for value in values])


def _number(value: float | None) -> float:
    try:
        return float("nan") if value is None else float(value)
    except OverflowError:
        return float("inf")
