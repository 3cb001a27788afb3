"""Recent samples of one latency, some of every size: rare large ones are kept beside the many small ones."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from tuner.workload import Floats

PER_CELL = 100
"""Newest samples of like size that are kept."""

MAX_CELLS = 512
MAX_ROWS = 2_000
"""A fit gets at most about so many."""

Sample = tuple[float, float, float, float]
"""Two regressors, seconds, Unix time."""


class Samples:
    """Bounded by `MAX_CELLS` × `PER_CELL` samples; the cell that was fed least recently gives way to a new one."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], deque[Sample]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._cells.values()))

    def add(self, samples: Sequence[Sample]) -> None:
        """Finite, not negative; their owner saw to that."""
        for sample in samples:
            key = int(sample[0]).bit_length(), int(sample[1]).bit_length() // 3
            cell = self._cells.pop(key, None) or deque(maxlen=PER_CELL)
            cell.append(sample)
            self._cells[key] = cell  # again at the end: cells are in the order in which they were fed
        while len(self._cells) > MAX_CELLS:
            del self._cells[next(iter(self._cells))]

    def table(self, max_rows: int = MAX_ROWS) -> Floats:
        """`(n, 4)`: the newest of each cell, as many of each as make about `max_rows`."""
        if not self._cells:
            return np.zeros((0, 4))
        quota = max(1, max_rows // len(self._cells))
        return np.array([sample for cell in self._cells.values() for sample in list(cell)[-quota:]], dtype=np.float64)
