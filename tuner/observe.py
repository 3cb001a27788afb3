"""What the tuner sees of the traffic: demand as it arrives, and what clients got of it.

A window is fed with what routers report, in whatever order and state it comes, and answers with a `Workload` and with
`Measured`. Bounded in memory; does nothing but arithmetic, and is told the time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from engines.records import ArrivalBatch, Outcome, RequestRecord
from tuner.cleaning import Cleaned, Flaw, clean_arrivals, clean_records, counted
from tuner.hot_prefixes import hot_contexts
from tuner.imputing import ended_well, with_outputs
from tuner.measuring import measure
from tuner.rows import OPEN, OUTCOMES, Rows, RowStore, blank, last_of_each
from tuner.sharing import Prompts, share
from tuner.slo import DEFAULT_CLASS, SloTable
from tuner.types import HotContext, Measured
from tuner.warm_up import WarmUp
from tuner.workload import Workload

MAX_CLASSES = 64
"""Names told apart; beyond that everything is `default`. A table of SLOs has at most 16."""
MAX_ROUTERS = 10_000
LEAST_SPAN_S = 1.0
LEAST_OF_CLASS = 24
"""Answers of a class that tell how long its answers are; with fewer, earlier ones help out."""
LENT = 64
"""Requests of each class that are remembered for that."""
REJECTED = OUTCOMES.index(Outcome.REJECTED)

_KNOWN_AT_END = (
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "plan_version",
    "ending",
    "ttft_cause",
    "tpot_cause",
    "warming",
)
"""What a record adds to a request whose arrival was seen."""

_KNOWN_AT_ARRIVAL = ("estimated_tokens", "prompt_bytes", "announced")
"""What an arrival adds to a request whose end was seen first."""


class Window:
    """The requests of the last `span_s` seconds, `max_requests` at most.

    Feed it with `add_arrivals` before `add_requests`, and tell it of live engines with `engines_seen`, each tick.
    """

    def __init__(self, span_s: float = 600.0, max_requests: int = 20_000, warm_up_s: float = 10.0) -> None:
        self.span_s = span_s
        self.warm_up = WarmUp(warm_up_s)
        self._store = RowStore(max_requests)
        self._flaws: Counter[Flaw] = Counter()
        self._classes: dict[str, int] = {DEFAULT_CLASS: 0}
        self._announcing_since_s: dict[str, float] = {}
        self._remembered = blank(0)
        """Of each class the last requests that ended well and have left the window."""
        self._first_s = np.inf
        self._whole_since_s = -np.inf
        """Before this, requests had to give way to newer ones."""

    def __len__(self) -> int:
        return len(self._store)

    @property
    def quality(self) -> Mapping[Flaw, int]:
        """Records by what was wrong with them, since the window was made."""
        return counted(self._flaws)

    def engines_seen(self, epochs: Mapping[str, str], now_s: float) -> None:
        """Engines that live now, by id: what a new one or a new epoch serves at first is not measured."""
        self.warm_up.seen(epochs, now_s)

    def add_arrivals(self, batches: Sequence[ArrivalBatch], now_s: float) -> None:
        """Take in what has arrived. Nothing in a batch makes this fail."""
        cleaned = clean_arrivals(batches, now_s)
        self._flaws.update(cleaned.flaws)
        self._note_routers(batches, now_s)
        slots = [self._store.slot_of(request_id) for request_id in cleaned.request_ids]
        self._announce([(row, slot) for row, slot in enumerate(slots) if slot is not None], cleaned)
        self._insert(cleaned, [slot is None for slot in slots], now_s)

    def add_requests(self, records: Sequence[RequestRecord], now_s: float) -> None:
        """Take in what has ended. Nothing in a record makes this fail."""
        cleaned = clean_records(records, now_s)
        self._flaws.update(cleaned.flaws)
        self._void(cleaned.absurd_ids)
        self._mark_warming(cleaned, records)
        cleaned.rows["expected"] = self._expected(cleaned)
        slots = [self._store.slot_of(request_id) for request_id in cleaned.request_ids]
        self._end([(row, slot) for row, slot in enumerate(slots) if slot is not None], cleaned)
        self._insert(cleaned, [slot is None for slot in slots], now_s)

    def workload(self, now_s: float, span_s: float, rng: np.random.Generator | None = None) -> Workload:
        """Demand by arrival over the last `span_s` seconds, or less if less was seen; it ends at `now_s`.

        Requests that have not ended have the length of answer of others like them, drawn with `rng` or in turns.
        Requests that the engines found wrong are left out. Classes are sorted by name.
        """
        began_s = self._began_s(now_s, span_s)
        rows = self._between(began_s, now_s)
        rows = rows[rows["ending"] != REJECTED]
        rows["prompt_tokens"] = _prompt_tokens(rows)
        lent = self._lent(rows, began_s)
        output_tokens = with_outputs(np.concatenate([lent, rows]), now_s, rng)[len(lent) :]
        shared = share(_prompts(rows, output_tokens))
        names = sorted(self._classes)
        renumbered = np.array([names.index(name) for name in self._classes])
        return Workload(
            span_s=now_s - began_s,
            classes=tuple(names),
            arrived_s=rows["arrived_s"] - began_s,
            prompt_tokens=np.maximum(1, rows["prompt_tokens"].round()).astype(np.int64),
            output_tokens=output_tokens.astype(np.int64),
            slo_class=renumbered[rows["slo_class"]],
            session=shared.session,
            root=shared.root,
            root_tokens=shared.root_tokens,
        )

    def measured(self, now_s: float, slos: SloTable, plan_version: int | None, since_s: float) -> Measured | None:
        """What clients got of what arrived from `since_s` on, under that plan (`None`: any).

        `None` while too little is settled to tell; see `tuner.measuring`.
        """
        since_s = max(since_s, self._began_s(now_s, self.span_s))
        rows = self._between(since_s, now_s)
        if plan_version is not None:
            rows = rows[rows["plan_version"] == plan_version]
        rows["prompt_tokens"] = _prompt_tokens(rows)
        return measure(rows, tuple(self._classes), slos, since_s, now_s)

    def hot_contexts(self, now_s: float, span_s: float, engines: int) -> Sequence[HotContext]:
        """What much of the traffic of the last `span_s` seconds begins with, for a fleet of so many engines."""
        rows = self._between(self._began_s(now_s, span_s), now_s)
        rows = rows[rows["ending"] != REJECTED]
        rows["prompt_tokens"] = _prompt_tokens(rows)
        return hot_contexts(_prompts(rows, rows["output_tokens"]), engines)

    def _began_s(self, now_s: float, span_s: float) -> float:
        """Where the window begins: not before anything was seen, nor where requests are missing for lack of room."""
        began_s = max(now_s - min(span_s, self.span_s), self._whole_since_s, self._first_s)
        return float(min(began_s, now_s - LEAST_SPAN_S) if np.isfinite(began_s) else now_s - LEAST_SPAN_S)

    def _between(self, since_s: float, now_s: float) -> Rows:
        rows = self._store.all
        rows = rows[(rows["arrived_s"] >= since_s) & (rows["arrived_s"] < now_s)]
        return rows[np.argsort(rows["arrived_s"], kind="stable")]

    def _lent(self, rows: Rows, began_s: float) -> Rows:
        """Requests from before, of classes of which hardly any of `rows` has ended: the like comes back."""
        counts = np.bincount(rows["slo_class"][ended_well(rows)], minlength=MAX_CLASSES)
        older = np.concatenate([self._remembered, self._between(-np.inf, began_s)])
        lent = last_of_each(older[ended_well(older) & (counts[older["slo_class"]] < LEAST_OF_CLASS)], LENT)
        lent["prompt_tokens"] = _prompt_tokens(lent)
        return lent

    def _insert(self, cleaned: Cleaned, new: Sequence[bool], now_s: float) -> None:
        """Add rows that are not there yet, and let go of what is too old or too much."""
        wanted = np.array(new, dtype=np.bool_)
        late = wanted & (cleaned.rows["arrived_s"] < now_s - self.span_s)
        unique: dict[str, int] = {}
        for row in np.flatnonzero(wanted & ~late).tolist():
            unique.setdefault(cleaned.request_ids[row], row)
        chosen = np.fromiter(unique.values(), dtype=np.int64, count=len(unique))
        self._flaws[Flaw.LATE] += int(late.sum())
        self._flaws[Flaw.DUPLICATE] += int((wanted & ~late).sum()) - len(chosen)
        rows = cleaned.rows[chosen]
        rows["slo_class"] = [self._class_index(cleaned.slo_classes[row]) for row in chosen]
        self._first_s = min(self._first_s, float(rows["arrived_s"].min(initial=np.inf)))
        self._let_go(self._store.expire(now_s - self.span_s))
        crowded_out = self._store.add(list(unique), rows)
        self._flaws[Flaw.CROWDED_OUT] += len(crowded_out)
        self._let_go(crowded_out)
        self._whole_since_s = max(self._whole_since_s, float(crowded_out["arrived_s"].max(initial=-np.inf)))

    def _let_go(self, rows: Rows) -> None:
        self._remembered = last_of_each(np.concatenate([self._remembered, rows[ended_well(rows)]]), LENT)
        self._flaws[Flaw.MISSING_RECORD] += int((rows["ending"] == OPEN).sum())
        self._flaws[Flaw.MISSING_ARRIVAL] += int((rows["expected"] & ~rows["announced"]).sum())

    def _announce(self, found: Sequence[tuple[int, int]], cleaned: Cleaned) -> None:
        """Arrivals of requests that are there: told twice, or after their end, which makes up for it."""
        news = [pair for pair in found if not self._store.at([pair[1]], "announced")[0]]
        self._flaws[Flaw.DUPLICATE] += len(found) - len(news)
        self._store.put([slot for _, slot in news], cleaned.rows[[row for row, _ in news]], _KNOWN_AT_ARRIVAL)

    def _end(self, found: Sequence[tuple[int, int]], cleaned: Cleaned) -> None:
        """Records of requests that are there; the first word on a request is the last."""
        slots = np.array([slot for _, slot in found], dtype=np.int64)
        chosen = np.array([row for row, _ in found], dtype=np.int64)
        _, first = np.unique(slots, return_index=True)
        first = first[self._store.at(slots[first], "ending") == OPEN]
        self._flaws[Flaw.DUPLICATE] += len(found) - len(first)
        rows, slots = cleaned.rows[chosen[first]], slots[first]
        self._store.put(slots, rows, _KNOWN_AT_END)
        undecided = (self._store.at(slots, "depth") == 0) & (rows["depth"] > 0)
        self._store.put(slots[undecided], rows[undecided], ("sketch", "depth"))

    def _void(self, request_ids: Sequence[str]) -> None:
        """The one record of these requests made no sense; there will not be another."""
        slots = [slot for request_id in request_ids if (slot := self._store.slot_of(request_id)) is not None]
        self._store.void([slot for slot in slots if self._store.at([slot], "ending")[0] == OPEN])

    def _mark_warming(self, cleaned: Cleaned, records: Sequence[RequestRecord]) -> None:
        engines = {record.request_id: (record.prefill_engine, record.decode_engine) for record in records}
        used = [engines[request_id] for request_id in cleaned.request_ids]
        at_s = cleaned.rows["arrived_s"]
        warming = self.warm_up.warming([prefill for prefill, _ in used], at_s)
        warming |= self.warm_up.warming([decode for _, decode in used], at_s)
        cleaned.rows["warming"] = warming
        self._flaws[Flaw.WARM_UP] += int(warming.sum())

    def _note_routers(self, batches: Sequence[ArrivalBatch], now_s: float) -> None:
        for batch in batches:
            if batch.router_id not in self._announcing_since_s and len(self._announcing_since_s) < MAX_ROUTERS:
                self._announcing_since_s[batch.router_id] = now_s

    def _expected(self, cleaned: Cleaned) -> list[bool]:
        """Which requests come from routers that had begun to report arrivals when they arrived."""
        since_s = [self._announcing_since_s.get(router_id, np.inf) for router_id in cleaned.router_ids]
        return list(np.array(since_s) < cleaned.rows["arrived_s"])

    def _class_index(self, name: str) -> int:
        if name not in self._classes and len(self._classes) < MAX_CLASSES:
            self._classes[name] = len(self._classes)
        return self._classes.get(name, 0)


def _prompt_tokens(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """True lengths where a record told them, else the router's estimate, corrected by how such estimates turned out."""
    exact, estimate = rows["prompt_tokens"], rows["estimated_tokens"]
    both = ~np.isnan(exact) & ~np.isnan(estimate)
    corrected = estimate * (np.median(exact[both] / estimate[both]) if both.any() else 1.0)
    for name in np.unique(rows["slo_class"]):
        same = rows["slo_class"] == name
        if (same & both).any():
            corrected[same] = estimate[same] * np.median(exact[same & both] / estimate[same & both])
    found = np.where(np.isnan(exact), corrected, exact)
    known = found[~np.isnan(found)]
    return np.where(np.isnan(found), np.median(known) if len(known) else 1.0, found)


def _prompts(rows: Rows, output_tokens: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Prompts:
    return Prompts(
        sketch=rows["sketch"],
        depth=rows["depth"],
        nbytes=np.nan_to_num(rows["prompt_bytes"]),
        tokens=rows["prompt_tokens"],
        total_tokens=rows["prompt_tokens"] + output_tokens,
        cached_tokens=rows["cached_tokens"],
    )
