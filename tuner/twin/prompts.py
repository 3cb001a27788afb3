"""Prompts for the kernel that share exactly what a workload says they share.

Each session is one endless stream of tokens, and so is each root. Token `i` of stream `k` is `k + i`: two streams never
agree at the same place. Prompts and answers of a session are pieces of its stream, behind its root's first tokens.
"""

from array import array

import numpy as np

from engines.emulated.sequences import GenerationState
from tuner.prefix import sketch
from tuner.twin.limits import BLOCK_TOKENS, MAX_BLOCKS

_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def choose_token(state: GenerationState) -> int:
    """The next token of the prompt's stream, so that the next prompt of the session goes on from the answer."""
    return state.prompt[-1] + len(state.outputs) + 1


class Streams:
    """Numbers sessions and roots as they come."""

    def __init__(self) -> None:
        self._sessions: dict[int, int] = {}
        self._roots: dict[int, int] = {}

    def session(self, session: int) -> int:
        return self._number(self._sessions, session)

    def root(self, root: int) -> int:
        return self._number(self._roots, root)

    def prompt(self, session: int, root: int, root_tokens: int, tokens: int) -> "array[int]":
        """Tokens of a prompt; its last one is always the session's own, as `choose_token` needs it."""
        made = array("I")
        shared = min(root_tokens, tokens - 1)
        if shared > 0:
            first = self.root(root)
            made.frombytes(np.arange(first, first + shared, dtype=np.uint32).tobytes())
        first = self.session(session)
        made.frombytes(np.arange(first + max(0, shared), first + tokens, dtype=np.uint32).tobytes())
        return made

    def blocks(self, session: int, root: int, root_tokens: int, tokens: int) -> list[int]:
        """What `tuner.prefix.block_hashes` would tell of the prompt: equal values mean equal beginnings."""
        total = min(tokens // BLOCK_TOKENS, MAX_BLOCKS)
        shared = min(root_tokens // BLOCK_TOKENS, total)
        first = self.session(session) * MAX_BLOCKS
        own = range(first + shared, first + total)
        if not shared:
            return list(own)
        first = self.root(root) * MAX_BLOCKS
        return [*range(first, first + shared), *own]

    def _number(self, known: dict[int, int], key: int) -> int:
        number = known.get(key)
        if number is None:
            number = known[key] = len(self._sessions) + len(self._roots) + 1
        return number


def prefix_hashes(blocks: list[int]) -> tuple[int, ...] | None:
    """The sketch of a prompt as request records carry it."""
    return tuple(prefix_hash(block) for block in sketch(blocks)) or None


def prefix_hash(block: int) -> int:
    """A block as it stands in sketches."""
    return (block * _SPREAD) & _MASK
