"""How fast an engine gets through the prompts that wait for it, learnt pass by pass."""

RATE_SMOOTHING = 0.2
"""Weight of the newest prefill pass."""
MIN_RATED_TOKENS = 64
"""Passes that compute fewer mostly measure the fixed cost of a pass."""


class PrefillRate:
    """Recent tokens over recent seconds, both smoothed with the same weights.

    Of passes, not of prompts: each prompt that shares a pass waits for the whole of it, so that its own tokens over its
    own seconds would tell of an engine as many times slower. And not a mean of the passes' own rates: short ones are
    slow for their length, and would weigh as much as long ones.
    """

    __slots__ = ("_behind_decode_s", "_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._behind_decode_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """`None` until something was measured."""
        return self._tokens / self._seconds if self._seconds else None

    def on_pass(self, prefill_tokens: int, wall_s: float, queued: int) -> None:
        """A pass is over; `queued` prompts waited for it, as in `PassRecord`.

        Prompts also wait for the decode passes that `prefill_decode_interval` puts between two of theirs, so the time
        of those belongs to the prefill pass that follows.
        """
        if prefill_tokens:
            self._learn(prefill_tokens, self._behind_decode_s + wall_s)
            self._behind_decode_s = 0.0
        elif queued:
            self._behind_decode_s += wall_s

    def _learn(self, tokens: int, seconds: float) -> None:
        if tokens < MIN_RATED_TOKENS or seconds <= 0:
            return
        weight = RATE_SMOOTHING if self._seconds else 1.0
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
