"""The context cache: a radix tree over token ids, with pins and least-recently-used eviction. No KV, only its tokens.

Edges are kept as bytes, four to a token, so that an edge of thousands of tokens is compared by one `memcmp`.
"""

import heapq
from array import array
from typing import NamedTuple

TOKEN_BYTES = array("I").itemsize


class Node:
    """The end of a cached prefix. Its edge holds the tokens behind its parent's; the root is its own parent."""

    __slots__ = ("children", "edge", "in_heap", "last_used", "locks", "parent", "serial")

    def __init__(self, edge: bytes, parent: "Node | None", last_used: int, serial: int) -> None:
        self.edge = edge
        self.parent = parent or self
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.last_used = last_used
        self.serial = serial
        self.in_heap = False

    @property
    def tokens(self) -> int:
        return len(self.edge) // TOKEN_BYTES

    @property
    def droppable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not self


class Match(NamedTuple):
    length: int
    """Tokens that were found."""
    node: Node
    """Where they end; lock it before anything can evict it."""


class Inserted(NamedTuple):
    added_tokens: int
    """Tokens that were not there before."""
    node: Node
    """The end of what was inserted."""


class RadixCache:
    """Prefixes of token arrays (`array("I")`). Counts tokens only; whose room they take is the pool's business."""

    def __init__(self) -> None:
        self._serial = 0
        self._clock = 0
        self._root = Node(b"", None, 0, 0)
        self._leaves: list[tuple[int, int, Node]] = []
        self.size_tokens = 0
        self.pinned_tokens = 0
        self.locks = 0
        """Locks that are held now."""

    @property
    def evictable_tokens(self) -> int:
        return self.size_tokens - self.pinned_tokens

    def peek(self, tokens: "array[int]", end: int | None = None) -> int:
        """How many leading tokens of `tokens[:end]` are cached. Changes nothing, not even what was used last."""
        data, limit = tokens.tobytes(), _limit(tokens, end)
        node, at = self._root, 0
        while at < limit and (child := node.children.get(data[at : at + TOKEN_BYTES])) is not None:
            shared = _shared(data, at, limit, child.edge)
            at += shared
            if shared < len(child.edge):
                break
            node = child
        return at // TOKEN_BYTES

    def match(self, tokens: "array[int]", end: int | None = None) -> Match:
        """The longest cached prefix of `tokens[:end]`, which becomes the most recently used one."""
        data, limit = tokens.tobytes(), _limit(tokens, end)
        node, at = self._walk(data, limit)
        return Match(at // TOKEN_BYTES, node)

    def insert(self, tokens: "array[int]", end: int | None = None) -> Inserted:
        """Make `tokens[:end]` a cached prefix, unpinned and most recently used."""
        data, limit = tokens.tobytes(), _limit(tokens, end)
        node, at = self._walk(data, limit)
        if at == limit:
            return Inserted(0, node)
        leaf = self._new_node(data[at:limit], node)
        self.size_tokens += leaf.tokens
        self._offer(leaf)
        return Inserted(leaf.tokens, leaf)

    def lock(self, node: Node) -> None:
        """Pin the prefix that ends at `node`. Locks count: each wants its own `unlock`."""
        self.locks += 1
        while node.parent is not node:
            if node.locks == 0:
                self.pinned_tokens += node.tokens
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Take back one `lock` of the same node."""
        self.locks -= 1
        at = node
        while at.parent is not at:
            at.locks -= 1
            if at.locks == 0:
                self.pinned_tokens -= at.tokens
            at = at.parent
        self._offer(node)

    def evict(self, tokens: int) -> int:
        """Drop whole leaves, least recently used first, until `tokens` are freed or all that is left is pinned.

        Returns how many were freed: up to a leaf more than asked for, fewer if there was no more to drop.
        """
        freed = 0
        while freed < tokens and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            node.in_heap = False
            if stamp < node.last_used:
                self._offer(node)
            elif node.droppable:
                freed += self._drop(node)
        return freed

    def check(self) -> None:
        """Raise `RuntimeError` if the counters disagree with the tree."""
        size = pinned = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            size += node.tokens
            pinned += node.tokens if node.locks else 0
            locks = self.locks if node is self._root else node.locks
            if locks < sum(child.locks for child in node.children.values()):
                raise RuntimeError("a cached prefix is locked less often than what hangs on it")
            if node.droppable and not node.in_heap:
                raise RuntimeError("an unpinned leaf would never be evicted")
            stack.extend(node.children.values())
        if (size, pinned) != (self.size_tokens, self.pinned_tokens):
            raise RuntimeError(f"tree holds {size}, {pinned} pinned; counted {self.size_tokens}, {self.pinned_tokens}")

    def _walk(self, data: bytes, limit: int) -> tuple[Node, int]:
        """Down from the root along `data[:limit]`, splitting the last edge where they part: the node, bytes matched."""
        self._clock += 1
        node, at = self._root, 0
        while at < limit and (child := node.children.get(data[at : at + TOKEN_BYTES])) is not None:
            shared = _shared(data, at, limit, child.edge)
            at += shared
            node = child if shared == len(child.edge) else self._split(child, shared)
            node.last_used = self._clock
            if node is not child:
                break
        return node, at

    def _split(self, lower: Node, at: int) -> Node:
        """Put a node into the edge above `lower`, which stays the object that its lockers hold."""
        upper = self._new_node(lower.edge[:at], lower.parent)
        upper.locks = lower.locks
        lower.edge = lower.edge[at:]
        lower.parent = upper
        upper.children[lower.edge[:TOKEN_BYTES]] = lower
        return upper

    def _new_node(self, edge: bytes, parent: Node) -> Node:
        self._serial += 1
        node = Node(edge, parent, self._clock, self._serial)
        parent.children[edge[:TOKEN_BYTES]] = node
        return node

    def _offer(self, node: Node) -> None:
        """Let eviction consider `node` if it is a leaf that nobody pins.

        Each node is in the heap at most once, with a stamp that may be older than its last use: `evict` then puts it
        back. Touching a node so costs nothing.
        """
        if node.droppable and not node.in_heap:
            node.in_heap = True
            heapq.heappush(self._leaves, (node.last_used, node.serial, node))

    def _drop(self, node: Node) -> int:
        parent, node.parent = node.parent, node
        del parent.children[node.edge[:TOKEN_BYTES]]
        self.size_tokens -= node.tokens
        self._offer(parent)
        return node.tokens


def _limit(tokens: "array[int]", end: int | None) -> int:
    return TOKEN_BYTES * (len(tokens) if end is None else min(end, len(tokens)))


def _shared(data: bytes, at: int, limit: int, edge: bytes) -> int:
    """Bytes, a whole number of tokens, that `edge` and `data[at:limit]` have in common at their start."""
    longest = min(len(edge), limit - at)
    if longest == len(edge) and data.startswith(edge, at):
        return longest
    low, high = 0, longest // TOKEN_BYTES  # the answer lies in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(edge[low * TOKEN_BYTES : middle * TOKEN_BYTES], at + low * TOKEN_BYTES):
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES
