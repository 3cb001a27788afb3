"""Stop strings that may span tokens: text that could still become one is held back and never leaks."""

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """One token and the part of its text that may be shown. Text without a token: the echo of a prompt, or none."""

    token: int | None
    text: str


class StopFilter:
    """Passes whole tokens through, in order, once no stop string can begin in them any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held: list[Piece] = []

    def push(self, token: int, text: str) -> tuple[list[Piece], bool]:
        """Add a token: what may be shown now, and whether a stop string was completed.

        At a stop, the text before it is shown, the last token cut short, and all after it is dropped.
        """
        self._held.append(Piece(token, text))
        if not self._stops:
            return self.flush(), False
        buffer = "".join(piece.text for piece in self._held)
        found = [at for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            shown = self._take_until(min(found), cut=True)
            self._held.clear()
            return shown, True
        return self._take_until(self._safe_length(buffer), cut=False), False

    def flush(self) -> list[Piece]:
        """All that is held back: the generation ended without a stop string."""
        held, self._held = self._held, []
        return held

    def _safe_length(self, buffer: str) -> int:
        """Up to where no suffix of `buffer` is the beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(0, len(buffer) - longest), len(buffer)):
            if any(stop.startswith(buffer[start:]) for stop in self._stops):
                return start
        return len(buffer)

    def _take_until(self, length: int, *, cut: bool) -> list[Piece]:
        taken: list[Piece] = []
        while self._held and len(self._held[0].text) <= length:
            piece = self._held.pop(0)
            length -= len(piece.text)
            taken.append(piece)
        if cut and self._held and length:
            taken.append(Piece(self._held[0].token, self._held[0].text[:length]))
        return taken
