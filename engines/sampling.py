"""Which forward passes an engine reports: each that prefills, and of the many that only decode a sample."""

DECODE_PASSES = 8
"""One decode pass in so many is told."""
DECODE_EVERY_S = 0.1
"""One that begins so long after the one told last is told too: an engine whose passes are long has few of them."""


class PassSample:
    """Asked once about each pass, in order.

    Whether a pass is told must not depend on how long it took: if those were told that end when one is due, long ones
    would be told more often, and what is learnt from the sample would be too slow.
    """

    def __init__(self) -> None:
        self._untold = 0
        self._told_began_s = 0.0

    def wants(self, prefill_tokens: int, began_s: float) -> bool:
        """Whether to report the pass; `began_s` may be of any clock that does not go backwards."""
        if prefill_tokens:
            return True
        self._untold += 1
        if self._untold < DECODE_PASSES and began_s < self._told_began_s + DECODE_EVERY_S:
            return False
        self._untold, self._told_began_s = 0, began_s
        return True
