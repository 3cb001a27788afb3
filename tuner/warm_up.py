"""Engines that have just joined are not yet what they will be: caches are cold, kernels compile."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.workload import Floats

FORGET_S = 3600.0
"""An engine that was not seen for so long is new when it comes back, whatever its epoch."""


class _Known(NamedTuple):
    epoch: str
    unseen_s: float
    """When it was looked for and not there yet, or first seen if that is not known."""
    first_s: float
    last_s: float


class WarmUp:
    """When each engine joined in its present epoch. Bounded by the engines of the last hour."""

    def __init__(self, warm_up_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._epochs: dict[str, _Known] = {}
        self._looked_s: float | None = None

    def seen(self, epochs: Mapping[str, str], now_s: float) -> None:
        """Engines that live now: id → epoch.

        Routers use an engine before anybody here has seen it, and its first moments are its coldest. So it warms up
        from when it was not there yet, however not from longer ago than warming up takes.
        """
        looked_s = now_s if self._looked_s is None else max(self._looked_s, now_s - self._warm_up_s)
        for engine_id, epoch in epochs.items():
            known = self._epochs.get(engine_id)
            if known is None or known.epoch != epoch:
                known = _Known(epoch, looked_s, now_s, now_s)
            self._epochs[engine_id] = known._replace(last_s=now_s)
        gone = [engine_id for engine_id, known in self._epochs.items() if now_s - known.last_s > FORGET_S]
        for engine_id in gone:
            del self._epochs[engine_id]
        self._looked_s = now_s

    def warming(self, engine_ids: Sequence[str | None], at_s: Floats) -> NDArray[np.bool_]:
        """Which of these moments lie in the warm-up of their engine. Engines never seen, and `None`, are warm."""
        warming = np.zeros(len(at_s), dtype=np.bool_)
        if not len(at_s) or not self._epochs:
            return warming
        if float(np.min(at_s)) >= max(known.first_s for known in self._epochs.values()) + self._warm_up_s:
            return warming
        found = [None if each is None else self._epochs.get(each) for each in engine_ids]
        since_s = np.array([np.inf if known is None else known.unseen_s for known in found])
        until_s = np.array([-np.inf if known is None else known.first_s + self._warm_up_s for known in found])
        return np.asarray((at_s >= since_s) & (at_s < until_s))
