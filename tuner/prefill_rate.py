"""How fast an engine prefills, learnt prompt by prompt."""

RATE_SMOOTHING = 0.2
"""Weight of the newest prompt."""
MIN_RATED_TOKENS = 64
"""Shorter prompts mostly measure the fixed cost of a pass."""


class PrefillRate:
    """Recent tokens over recent seconds, both smoothed with the same weights.

    Not a mean of the prompts' own rates: short prompts are slow for their length, and what they take hardly adds to a
    queue, yet each would weigh as much as a long one.
    """

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """`None` until something was measured."""
        return self._tokens / self._seconds if self._seconds else None

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens < MIN_RATED_TOKENS or seconds <= 0:
            return
        weight = RATE_SMOOTHING if self._seconds else 1.0
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
