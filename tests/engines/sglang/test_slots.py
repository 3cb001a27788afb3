"""Rows, runs and regions of a KV pool."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.sglang.slots import from_runs, regions, rows_of, to_runs
from engines.sglang.wire import Buffer

rows = st.lists(st.integers(0, 50), min_size=1, max_size=30, unique=True)


@settings(deadline=None)
@given(rows)
def test_runs_say_the_same_as_rows(found):
    assert from_runs(to_runs(np.array(found, dtype=np.int64))).tolist() == found


def test_consecutive_rows_are_one_run():
    assert to_runs(np.array([3, 4, 5, 9, 8])) == [(3, 3), (9, 1), (8, 1)]


def test_no_rows_are_no_runs():
    assert to_runs(np.empty(0, dtype=np.int64)) == []
    assert from_runs([]).tolist() == []


def test_pages_are_counted_by_their_first_slot():
    assert rows_of(np.arange(8, 16), 4).tolist() == [2, 3]


@settings(deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_regions_copy_each_row_to_its_place_in_all_buffers(mine, random):
    theirs = random.sample(range(51), len(mine))
    memory = {side: [np.zeros((51, width), dtype=np.uint8) for width in (4, 6)] for side in ("mine", "theirs")}
    for buffer in memory["mine"]:
        buffer[:] = np.arange(51, dtype=np.uint8)[:, None] + 1
    described = {
        side: [Buffer(buffer.ctypes.data, buffer.shape[1], 51) for buffer in buffers]
        for side, buffers in memory.items()
    }
    sources, targets = regions(np.array(mine), np.array(theirs), described["mine"], described["theirs"], (0, 3))
    assert sources[:, 1].tolist() == targets[:, 1].tolist()
    assert set(targets[:, 2].tolist()) == {3}
    _copy(memory, sources.tolist(), targets.tolist())
    for buffer in memory["theirs"]:
        assert buffer[theirs, 0].tolist() == [row + 1 for row in mine]
        assert np.count_nonzero(buffer[:, 0]) == len(mine)


def test_regions_are_as_few_as_runs_allow():
    buffers = [Buffer(0, 8, 100)] * 3
    sources, _ = regions(np.arange(10, 20), np.arange(50, 60), buffers, buffers, (0, 0))
    assert sources.tolist() == [[80, 80, 0]] * 3


def _copy(memory, sources, targets):
    """Copy between the arrays that the addresses lie in."""
    for (source, count, _), (target, _, _) in zip(sources, targets, strict=True):
        taken = _span(memory["mine"], source, count)
        _span(memory["theirs"], target, count)[:] = taken


def _span(buffers, address, count):
    for buffer in buffers:
        offset = address - buffer.ctypes.data
        if 0 <= offset < buffer.nbytes:
            return buffer.reshape(-1)[offset : offset + count]
    raise AssertionError("an address outside of all buffers")
