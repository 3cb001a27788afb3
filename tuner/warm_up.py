"""Engines that have just joined are not yet what they will be: caches are cold, kernels compile."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.workload import Floats

FORGET_S = 3600.0
"""An engine that was not seen for so long is new when it comes back, whatever its epoch."""


class WarmUp:
    """When each engine was first seen in its present epoch. Bounded by the engines of the last hour."""

    def __init__(self, warm_up_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._epochs: dict[str, tuple[str, float, float]] = {}

    def seen(self, epochs: Mapping[str, str], now_s: float) -> None:
        """Engines that live now: id → epoch."""
        for engine_id, epoch in epochs.items():
            known = self._epochs.get(engine_id)
            since_s = known[1] if known is not None and known[0] == epoch else now_s
            self._epochs[engine_id] = epoch, since_s, now_s
        gone = [engine_id for engine_id, (_, _, last_s) in self._epochs.items() if now_s - last_s > FORGET_S]
        for engine_id in gone:
            del self._epochs[engine_id]

    def warming(self, engine_ids: Sequence[str | None], at_s: Floats) -> NDArray[np.bool_]:
        """Which of these moments lie in the warm-up of their engine. Engines never seen, and `None`, are warm."""
        warming = np.zeros(len(at_s), dtype=np.bool_)
        if not len(at_s) or not self._epochs:
            return warming
        joined = {engine_id: since_s for engine_id, (_, since_s, _) in self._epochs.items()}
        latest_s = max(joined.values())
        if float(np.min(at_s)) >= latest_s + self._warm_up_s:
            return warming
        nothing = -np.inf
        since_s = np.array([nothing if each is None else joined.get(each, nothing) for each in engine_ids])
        return np.asarray((at_s >= since_s) & (at_s < since_s + self._warm_up_s))
