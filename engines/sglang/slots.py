"""Arithmetic on the rows of a KV pool: runs of rows, and the memory regions behind them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engines.sglang.wire import Buffer, Runs

Rows = npt.NDArray[np.int64]
Regions = npt.NDArray[np.uint64]
"""Columns: address, bytes, device."""


def rows_of(slots: Rows, page_size: int) -> Rows:
    """The pages of token slots that begin and end at a page's edge."""
    return slots if page_size == 1 else slots[::page_size] // page_size


def to_runs(rows: Rows) -> Runs:
    """Consecutive rows together."""
    if not len(rows):
        return []
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    counts = np.diff(starts, append=len(rows))
    return list(zip(rows[starts].tolist(), counts.tolist(), strict=True))


def from_runs(runs: Runs) -> Rows:
    if not runs:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])


def regions(
    mine: Rows, theirs: Rows, my_buffers: Sequence[Buffer], their_buffers: Sequence[Buffer], devices: tuple[int, int]
) -> tuple[Regions, Regions]:
    """The regions to copy so that every `mine[i]` ends up in `theirs[i]`, of all buffers, as few as possible."""
    breaks = (np.diff(mine) != 1) | (np.diff(theirs) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(starts, append=len(mine))
    return (
        _regions(mine[starts], counts, my_buffers, devices[0]),
        _regions(theirs[starts], counts, their_buffers, devices[1]),
    )


def _regions(firsts: Rows, counts: Rows, buffers: Sequence[Buffer], device_id: int) -> Regions:
    bases = np.array([buffer.base for buffer in buffers], dtype=np.uint64)[:, None]
    widths = np.array([buffer.row_bytes for buffer in buffers], dtype=np.uint64)[:, None]
    found = np.empty((len(buffers) * len(firsts), 3), dtype=np.uint64)
    found[:, 0] = (bases + widths * firsts.astype(np.uint64)[None, :]).ravel()
    found[:, 1] = (widths * counts.astype(np.uint64)[None, :]).ravel()
    found[:, 2] = device_id
    return found
