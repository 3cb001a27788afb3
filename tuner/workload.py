"""A workload: requests as the simulators replay them, one column per property.

Prompts are known by their lengths and by what they share, never by their text. Sharing has two levels:

- *session*: a conversation. Each prompt of a session extends the one before and its answer, so an engine that holds
  `k` tokens of the session saves `min(k, prompt_tokens - 1)` of any of its prompts.
- *root*: a system prompt or document that many sessions begin with; its first `root_tokens` are shared by all of them.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCKS = 8
"""Time blocks that a bootstrap cuts a window into: long enough to keep bursts and most of a session together."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """`n` requests in order of arrival over `span_s` seconds. All columns have length `n`."""

    span_s: float
    classes: tuple[str, ...]
    arrived_s: Floats
    """Seconds since the window began, not decreasing, in `[0, span_s)`."""
    prompt_tokens: Ints
    output_tokens: Ints
    slo_class: Ints
    """Index into `classes`."""
    session: Ints
    root: Ints
    root_tokens: Ints
    """Leading tokens that all prompts of the same root share; 0 for none."""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self._columns().values()}
        if len(lengths) != 1:
            raise ValueError(f"columns of a workload differ in length: {sorted(lengths)}")
        if not np.isfinite(self.span_s) or self.span_s <= 0:
            raise ValueError(f"span_s is {self.span_s}, but must be above 0")
        if len(self) and (np.any(np.diff(self.arrived_s) < 0) or self.arrived_s[0] < 0):
            raise ValueError("arrivals must be in order and not before the window")

    def __len__(self) -> int:
        return len(self.arrived_s)

    @property
    def rate_rps(self) -> float:
        return len(self) / self.span_s

    def take(self, rows: NDArray[np.bool_] | Ints | slice, span_s: float | None = None) -> Self:
        """Some of the requests; times stay as they are."""
        columns = {name: column[rows] for name, column in self._columns().items()}
        return replace(self, span_s=self.span_s if span_s is None else span_s, **columns)

    def since(self, at_s: float) -> Self:
        """What arrived from `at_s` on, with that moment as the new beginning."""
        rows = self.arrived_s >= at_s
        later = self.take(rows, self.span_s - at_s)
        return replace(later, arrived_s=later.arrived_s - at_s)

    def until(self, at_s: float) -> Self:
        """What arrived before `at_s`."""
        return self.take(self.arrived_s < at_s, min(at_s, self.span_s))

    def at_rate(self, factor: float) -> Self:
        """The same requests, arriving `factor` times as fast."""
        return replace(self, arrived_s=self.arrived_s / factor, span_s=self.span_s / factor)

    def rushed(self, seconds: float) -> Self:
        """The same requests, those of the first `seconds` all at the very beginning: what has piled up already."""
        if seconds <= 0:
            return self
        return replace(self, arrived_s=np.maximum(self.arrived_s - seconds, 0.0), span_s=self.span_s - seconds)

    def bootstrap(self, rng: np.random.Generator, span_s: float) -> Self:
        """A like workload of `span_s` seconds: time blocks drawn with replacement, whole, so that bursts stay bursts.

        A block that is drawn again brings new sessions but the same roots.
        """
        block_s = self.span_s / BLOCKS
        drawn = rng.integers(BLOCKS, size=int(np.ceil(span_s / block_s)))
        block_of = np.minimum((self.arrived_s / block_s).astype(np.int64), BLOCKS - 1)
        rows, shifts, copies = [], [], []
        seen = np.zeros(BLOCKS, dtype=np.int64)
        for place, block in enumerate(drawn):
            chosen = np.flatnonzero(block_of == block)
            rows.append(chosen)
            shifts.append(np.full(len(chosen), (place - block) * block_s))
            copies.append(np.full(len(chosen), seen[block]))
            seen[block] += 1
        return self._redrawn(np.concatenate(rows), np.concatenate(shifts), np.concatenate(copies), span_s)

    def _redrawn(self, rows: Ints, shifts_s: Floats, copies: Ints, span_s: float) -> Self:
        sessions = int(self.session.max(initial=0)) + 1
        columns = {name: column[rows] for name, column in self._columns().items()}
        columns["arrived_s"] = np.maximum(columns["arrived_s"] + shifts_s, 0.0)
        columns["session"] = columns["session"] + copies * sessions
        within = columns["arrived_s"] < span_s
        return replace(self, span_s=span_s, **{name: column[within] for name, column in columns.items()})

    def _columns(self) -> dict[str, Any]:
        return {
            "arrived_s": self.arrived_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "slo_class": self.slo_class,
            "session": self.session,
            "root": self.root,
            "root_tokens": self.root_tokens,
        }


def concatenate(workloads: "list[Workload]") -> Workload:
    """One after the other in time; sessions and roots stay apart. All must have the same classes."""
    first = workloads[0]
    if any(each.classes != first.classes for each in workloads):
        raise ValueError("workloads with different classes cannot follow each other")
    offsets_s = np.cumsum([0.0, *(each.span_s for each in workloads[:-1])])
    sessions = np.cumsum([0, *(int(each.session.max(initial=0)) + 1 for each in workloads[:-1])])
    roots = np.cumsum([0, *(int(each.root.max(initial=0)) + 1 for each in workloads[:-1])])
    return Workload(
        span_s=float(sum(each.span_s for each in workloads)),
        classes=first.classes,
        arrived_s=np.concatenate([each.arrived_s + at for each, at in zip(workloads, offsets_s, strict=True)]),
        prompt_tokens=np.concatenate([each.prompt_tokens for each in workloads]),
        output_tokens=np.concatenate([each.output_tokens for each in workloads]),
        slo_class=np.concatenate([each.slo_class for each in workloads]),
        session=np.concatenate([each.session + at for each, at in zip(workloads, sessions, strict=True)]),
        root=np.concatenate([each.root + at for each, at in zip(workloads, roots, strict=True)]),
        root_tokens=np.concatenate([each.root_tokens for each in workloads]),
    )
