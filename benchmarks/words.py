"""Prompts made of words, for whoever takes no token ids."""

import random
from pathlib import Path

from engines.tokenizer import Tokenizer

WORDS = ("river", "bread", "clock", "horse", "bridge", "glass", "winter", "letter", "map", "bee", "stone", "wind")


class Prompts:
    """Prompts of a given length that share nothing."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.load(model)
        self._rng = random.Random(seed)

    def new(self, tokens: int) -> str:
        """A text of so many tokens or a few more."""
        words = self._rng.choices(WORDS, k=max(1, tokens // 2))
        while len(self._tokenizer.encode(" ".join(words))) < tokens:
            words += self._rng.choices(WORDS, k=max(1, tokens // 20))
        return " ".join(words)
