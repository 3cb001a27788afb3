"""Which forward passes an engine reports: each that prefills, and of the many that only decode a sample."""

DECODE_PASSES = 8
"""One decode pass in so many is told."""
DECODE_EVERY_S = 0.25
"""One is told at least this often: an engine whose passes are long has few of them, and must be learnt from too."""


class PassSample:
    """Asked once about each pass, in order."""

    def __init__(self) -> None:
        self._untold = 0
        self._told_s = 0.0

    def wants(self, prefill_tokens: int, ended_s: float) -> bool:
        """Whether to report the pass; `ended_s` may be of any clock that does not go backwards."""
        if prefill_tokens:
            return True
        self._untold += 1
        if self._untold < DECODE_PASSES and ended_s < self._told_s + DECODE_EVERY_S:
            return False
        self._untold, self._told_s = 0, ended_s
        return True
