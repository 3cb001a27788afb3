"""A guess at which engine holds which context: remembers where prompts went, block by block.

Prompts are known here by chained hashes of fixed-size blocks of their bytes, so neither text nor tokens are kept, and
the same prompt gives the same hashes in every process. Guesses only steer placement: engines match for themselves.
"""

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 512


def block_hashes(prompt: bytes, limit: int = 512) -> list[int]:
    """Hash of each whole block of `prompt`, each covering everything before it; at most `limit` blocks.

    Seeding each block's hash with the one before makes equal hashes mean equal prefixes.
    """
    hashes = []
    seed = 0
    for start in range(0, min(len(prompt) // BLOCK_BYTES, limit) * BLOCK_BYTES, BLOCK_BYTES):
        seed = xxh3_64_intdigest(prompt[start : start + BLOCK_BYTES], seed)
        hashes.append(seed)
    return hashes


def sketch(hashes: Sequence[int]) -> tuple[int, ...]:
    """Every power-of-two-th hash: enough to tell, within a factor of two, how much two prompts share."""
    return _picker(len(hashes).bit_length())(hashes)


@cache
def _picker(powers: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Picks the first `powers` power-of-two-th hashes. Made once for each length: routers sketch every prompt."""
    if powers < 2:
        return lambda hashes: tuple(hashes[:1])
    return itemgetter(*[(1 << power) - 1 for power in range(powers)])


class PrefixIndex:
    """Block hash -> engines that were sent it, bounded to about `capacity` blocks.

    Two generations stand in for an exact LRU: what was not touched while the young one filled up is dropped.
    Engines are bits of an integer, so that matching a prompt is one dictionary look-up and one AND per block.
    """

    def __init__(self, capacity: int = 200_000) -> None:
        self._half = max(1, capacity // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._next_bit = 1

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Leading blocks of the prompt that each engine probably holds; engines with none are left out."""
        deepest: dict[str, int] = {}
        holders = -1
        for depth, block in enumerate(hashes):
            still = holders & (self._young.get(block, 0) | self._old.get(block, 0))
            if still != holders and depth:
                self._note(deepest, holders & ~still, depth)
            holders = still
            if not holders:
                return deepest
        if hashes:
            self._note(deepest, holders, len(hashes))
        return deepest

    def add(self, hashes: Sequence[int], engine_id: str) -> None:
        """Remember that the engine now holds these blocks."""
        bit = self._bits.get(engine_id) or self._new_bit(engine_id)
        for block in hashes:
            self._young[block] = self._young.get(block, 0) | self._old.get(block, 0) | bit
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def forget(self, engine_id: str) -> None:
        """An engine is gone, and its context with it. Its bit is never given to another and ages out."""
        self._bits.pop(engine_id, None)

    def _new_bit(self, engine_id: str) -> int:
        bit = self._bits[engine_id] = self._next_bit
        self._next_bit <<= 1
        return bit

    def _note(self, deepest: dict[str, int], holders: int, depth: int) -> None:
        for engine_id, bit in self._bits.items():
            if holders & bit:
                deepest[engine_id] = depth
