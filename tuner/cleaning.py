"""From what routers report to rows that can be trusted. What cannot be is refused, and counted by reason."""

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.records import ArrivalBatch, Outcome, RequestRecord
from tuner.blame import REFUSALS, Cause, ttft_cause
from tuner.rows import OUTCOMES, Rows, blank, numbers
from tuner.sharing import LEVELS
from tuner.workload import Floats

MAX_TOKENS = 10_000_000
MAX_BYTES = 1 << 40
MAX_S = 86_400.0
MAX_VERSION = 2**53
AHEAD_S = 1.0
"""By how much a router's clock may be ahead without being called skewed."""

CAUSES = tuple(Cause)
_ENDING = {outcome: index for index, outcome in enumerate(OUTCOMES)}
_CAUSE = {cause: index for index, cause in enumerate(CAUSES)}
_UINT64 = 1 << 64


class Flaw(enum.StrEnum):
    """What was wrong with a record, or with the lack of one."""

    MISSING_ARRIVAL = "missing_arrival"
    """A request left the window and its arrival was never reported, though its router reports arrivals."""
    MISSING_RECORD = "missing_record"
    """A request left the window and nothing ever told how it ended."""
    LATE = "late"
    """About a request that arrived before the window began. Refused."""
    DUPLICATE = "duplicate"
    """Told before. Refused."""
    SKEWED = "skewed"
    """From the future, so the router's clock is ahead. Taken as of now."""
    ABSURD = "absurd"
    """Values that cannot be. Refused; the request, if known, stays as demand of unknown fate."""
    WARM_UP = "warm_up"
    """Served by an engine that had just joined. Counts as demand, not for what was measured."""
    CROWDED_OUT = "crowded_out"
    """More requests than the window holds; the oldest gave way."""


class Cleaned(NamedTuple):
    """Rows that make sense, with what names them; all of one length."""

    request_ids: Sequence[str]
    router_ids: Sequence[str]
    slo_classes: Sequence[str]
    rows: Rows
    flaws: Counter[Flaw]
    absurd_ids: Sequence[str] = ()


def clean_arrivals(batches: Sequence[ArrivalBatch], now_s: float) -> Cleaned:
    """One row for each request of the batches that makes sense."""
    whole = [batch for batch in batches if _even(batch)]
    flaws = Counter({Flaw.ABSURD: sum(len(batch.request_ids) for batch in batches if not _even(batch))})
    rows = blank(sum(len(batch.request_ids) for batch in whole))
    rows["arrived_s"] = np.concatenate([np.zeros(0), *(_not_ahead(batch, now_s, flaws) for batch in whole)])
    for name, column in (("estimated_tokens", "prompt_tokens"), ("prompt_bytes", "prompt_bytes")):
        rows[name] = numbers([value for batch in whole for value in getattr(batch, column)])
    versions = numbers([value for batch in whole for value in batch.plan_versions])
    _set_sketches(rows, [hashes for batch in whole for hashes in batch.prefix_hashes])
    rows["announced"] = True
    sane = _within(rows["arrived_s"], 0, np.inf) & _within(rows["estimated_tokens"], 1, MAX_TOKENS)
    sane &= _within(rows["prompt_bytes"], 0, MAX_BYTES) & _within(versions, 0, MAX_VERSION)
    rows["plan_version"] = np.where(sane, versions, 0)
    flaws[Flaw.ABSURD] += int((~sane).sum())
    return _kept(
        sane,
        [each for batch in whole for each in batch.request_ids],
        [batch.router_id for batch in whole for _ in batch.request_ids],
        [each for batch in whole for each in batch.slo_classes],
        rows,
        flaws,
    )


def clean_records(records: Sequence[RequestRecord], now_s: float) -> Cleaned:
    """One row for each record that makes sense. `arrived_s` is the router's word; prefer that of the arrival."""
    rows = blank(len(records))
    for name in ("prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s"):
        rows[name] = numbers([getattr(record, name) for record in records])
    rows["arrived_s"] = numbers([record.arrived_at_s for record in records])
    rows["cached_tokens"] = numbers([_found_cached(record) for record in records])
    rows["ending"] = [_ENDING[record.outcome] for record in records]
    _set_sketches(rows, [record.prefix_hashes or () for record in records])
    versions = numbers([record.plan_version for record in records])
    flaws: Counter[Flaw] = Counter()
    sane = _sane(rows) & _sane_parts(records) & _within(versions, 0, MAX_VERSION)
    rows["plan_version"] = np.where(sane, versions, 0)
    rows["ttft_cause"] = [_ttft_cause(record) if good else 0 for record, good in zip(records, sane, strict=True)]
    rows["tpot_cause"] = [_CAUSE[Cause.ERROR if record.resumed else Cause.DECODE] for record in records]
    ahead = sane & (rows["arrived_s"] > now_s + AHEAD_S)
    rows["arrived_s"] = np.where(ahead, now_s - rows["e2e_s"], rows["arrived_s"])
    flaws[Flaw.SKEWED] += int(ahead.sum())
    flaws[Flaw.ABSURD] += int((~sane).sum())
    ids = [record.request_id for record in records]
    kept = _kept(sane, ids, [r.router_id for r in records], [r.slo_class for r in records], rows, flaws)
    return kept._replace(absurd_ids=[ids[at] for at in np.flatnonzero(~sane)])


def _ttft_cause(record: RequestRecord) -> int:
    """What was refused or failed has no parts to tell apart."""
    if record.outcome in (Outcome.OK, Outcome.GAVE_UP):
        return _CAUSE[ttft_cause(record)]
    return _CAUSE[Cause.REFUSED if record.outcome in REFUSALS else Cause.ERROR]


def _sane_parts(records: Sequence[RequestRecord]) -> NDArray[np.bool_]:
    """Parts of the time may be unknown, but each must be one that can be."""
    sane = np.ones(len(records), dtype=np.bool_)
    for name in ("queue_s", "prefill_s", "transfer_s", "decode_s"):
        part_s = numbers([getattr(record, name) for record in records])
        sane &= np.isnan(part_s) | _within(part_s, 0, MAX_S)
    return sane


def _sane(rows: Rows) -> NDArray[np.bool_]:
    """A request that ended well has a first token, and no part of a request takes longer than the whole."""
    ok = rows["ending"] == _ENDING[Outcome.OK]
    e2e_s, ttft_s = rows["e2e_s"], rows["ttft_s"]
    sane = _within(rows["arrived_s"], 0, np.inf) & _within(e2e_s, 0, MAX_S)
    sane &= (np.isnan(ttft_s) & ~ok) | (_within(ttft_s, 0, MAX_S) & (ttft_s <= e2e_s + AHEAD_S))
    sane &= np.isnan(rows["tpot_s"]) | _within(rows["tpot_s"], 0, MAX_S)
    sane &= np.isnan(rows["output_tokens"]) | _within(rows["output_tokens"], 0, MAX_TOKENS)
    prompt, cached = rows["prompt_tokens"], rows["cached_tokens"]
    sane &= np.isnan(prompt) | _within(prompt, 1, MAX_TOKENS)
    sane &= np.isnan(cached) | _within(cached, 0, MAX_TOKENS)
    return np.asarray(sane & ~(cached > prompt))


def _found_cached(record: RequestRecord) -> int | None:
    """What the decode engine held before anything was sent to it: a split has its transfer in `cached_tokens`."""
    return record.cached_tokens if record.split_begin is None else record.split_begin


def _even(batch: ArrivalBatch) -> bool:
    columns = (
        batch.arrived_at_s,
        batch.prompt_tokens,
        batch.prompt_bytes,
        batch.slo_classes,
        batch.plan_versions,
        batch.prefix_hashes,
    )
    return all(len(column) == len(batch.request_ids) for column in columns)


def _not_ahead(batch: ArrivalBatch, now_s: float, flaws: Counter[Flaw]) -> Floats:
    """Times of a batch, none of them after now. If its router's clock is ahead, all move back together."""
    at_s = numbers(batch.arrived_at_s)
    ahead = at_s > now_s + AHEAD_S
    if not ahead.any():
        return at_s
    flaws[Flaw.SKEWED] += int(ahead.sum())
    finite = np.isfinite(at_s)
    ahead_s = float(np.median(at_s[finite])) - now_s if ahead.all() and finite.any() else 0.0
    return np.where(finite, np.minimum(at_s - ahead_s, now_s), at_s)


def _set_sketches(rows: Rows, sketches: Sequence[Sequence[int]]) -> None:
    """Hashes that do not fit are as good as none."""
    depth = np.minimum([len(hashes) for hashes in sketches], LEVELS).astype(np.int64)
    for levels in range(1, LEVELS + 1):
        chosen = np.flatnonzero(depth == levels)
        if len(chosen):
            hashes = [sketches[row][:levels] for row in chosen.tolist()]
            rows["sketch"][chosen, :levels], rows["depth"][chosen] = _hash_columns(hashes, levels)


def _hash_columns(hashes: Sequence[Sequence[int]], levels: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes as an array, and how many of each row can be used: all or none."""
    try:
        return np.array(hashes, dtype=np.uint64), np.full(len(hashes), levels)
    except OverflowError:
        fit = [min(row) >= 0 and max(row) < _UINT64 for row in hashes]
        fitting = [row if good else (0,) * levels for row, good in zip(hashes, fit, strict=True)]
        return np.array(fitting, dtype=np.uint64), np.where(fit, levels, 0)


def _within(values: Floats, low: float, high: float) -> NDArray[np.bool_]:
    """Finite and in bounds; false for NaN."""
    return np.isfinite(values) & (values >= low) & (values <= high)


def _kept(
    sane: NDArray[np.bool_],
    request_ids: Sequence[str],
    router_ids: Sequence[str],
    slo_classes: Sequence[str],
    rows: Rows,
    flaws: Counter[Flaw],
) -> Cleaned:
    if sane.all():
        return Cleaned(request_ids, router_ids, slo_classes, rows, flaws)
    at = np.flatnonzero(sane).tolist()
    return Cleaned(
        [request_ids[index] for index in at],
        [router_ids[index] for index in at],
        [slo_classes[index] for index in at],
        rows[sane],
        flaws,
    )


def counted(flaws: Mapping[Flaw, int]) -> dict[Flaw, int]:
    """All reasons, those that never happened included."""
    return {flaw: flaws.get(flaw, 0) for flaw in Flaw}
