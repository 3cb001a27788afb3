"""Whose every token of KV room is: free, cached, private to a request, or reserved for a transfer."""

from array import array

from engines.emulated.radix import Node, RadixCache


class KvPool:
    """Room for `capacity_tokens`. What is free or cached and unpinned is `available`: taking it may evict."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.cache = RadixCache()
        self.free_tokens = capacity_tokens
        self.private_tokens = 0
        self.reserved_tokens = 0

    @property
    def available_tokens(self) -> int:
        return self.free_tokens + self.cache.evictable_tokens

    @property
    def used_tokens(self) -> int:
        """Private or pinned: neither reserved nor available."""
        return self.private_tokens + self.cache.pinned_tokens

    def take(self, tokens: int) -> bool:
        """Make available room private; `False`, and nothing changed, if there is too little."""
        if not self._free_up(tokens):
            return False
        self.free_tokens -= tokens
        self.private_tokens += tokens
        return True

    def give(self, tokens: int) -> None:
        """Private room becomes free."""
        self.private_tokens -= tokens
        self.free_tokens += tokens

    def reserve(self, tokens: int) -> bool:
        """Make available room reserved; `False`, and nothing changed, if there is too little."""
        if not self._free_up(tokens):
            return False
        self.free_tokens -= tokens
        self.reserved_tokens += tokens
        return True

    def unreserve(self, tokens: int) -> None:
        """Reserved room becomes free."""
        self.reserved_tokens -= tokens
        self.free_tokens += tokens

    def store(self, tokens: "array[int]", end: int, private_tokens: int) -> Node:
        """Put `tokens[:end]` into the cache, unpinned; its last `private_tokens` come out of private room.

        What of it was cached meanwhile by another request becomes free. All before must be pinned by the caller.
        """
        self.give(private_tokens)
        inserted = self.cache.insert(tokens, end)
        self.free_tokens -= inserted.added_tokens
        return inserted.node

    def check(self) -> None:
        """Raise `RuntimeError` if the parts do not add up to the capacity."""
        parts = (self.free_tokens, self.cache.size_tokens, self.private_tokens, self.reserved_tokens)
        if min(parts) < 0 or sum(parts) != self.capacity_tokens:
            raise RuntimeError(f"free, cached, private, reserved {parts} are not {self.capacity_tokens} tokens")
        self.cache.check()

    def _free_up(self, tokens: int) -> bool:
        if self.available_tokens < tokens:
            return False
        if self.free_tokens < tokens:
            self.free_tokens += self.cache.evict(tokens - self.free_tokens)
        return True
