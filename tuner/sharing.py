"""What prompts share, told from sketches of their block hashes: sessions that go on, and roots that they begin with.

A sketch has the hash of a prompt's first 1, 2, 4, 8 … blocks, each covering all before it, so sketches form a tree:

- where a path has one way to go on, prompts below extend each other: one session;
- where it branches, what lies above is a root, known within a factor of two, and each branch is a session;
- where prompts follow one path without growing, they only begin alike: a root again, and as many sessions as prompts.

What engines found in their context caches narrows roots down, and shows first turns that end inside a root.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.prefix import BLOCK_BYTES
from tuner.workload import Floats, Ints

LEVELS = 10
"""Of a sketch: blocks 1 to 512."""

TOKENS_PER_BLOCK = BLOCK_BYTES / 4
"""Until prompts of known size and length say better."""

CROWDED = 0.25
"""Prompts on one path of which more than this share are shorter than the one before do not extend each other."""

EXTENDS = 0.05
"""Share of possible extensions of which some cache held more than the root, from which on all are taken for such.

Most turns find nothing of their session on the engine they get, so a small share says much."""

OPEN_TURNS = 64
"""First turns at one root that may still be extended; the oldest give way."""

Nodes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Columns of one length, in order of arrival. NaN is unknown."""

    sketch: NDArray[np.uint64]
    """`(n, LEVELS)`; what is beyond `depth` is ignored."""
    depth: Ints
    """Hashes in the sketch; 0 for a prompt of less than one block."""
    nbytes: Floats
    tokens: Floats
    total_tokens: Floats
    """Prompt and answer: what an engine that served it holds."""
    cached_tokens: Floats
    """Found in a context cache."""


class Shared(NamedTuple):
    session: Ints
    root: Ints
    root_tokens: Ints


def share(prompts: Prompts) -> Shared:
    """Sessions and roots of all prompts; those without a sketch are alone. A pass or two over the columns."""
    tree = _Tree(prompts)
    session, root = _chains(prompts, tree)
    estimates = _root_tokens(prompts, tree, root, _begins(session))
    session = _with_first_turns(prompts, tree, session, root, estimates)
    tokens = np.where(root >= 0, estimates[root], 0.0) if len(estimates) else np.zeros(len(root))
    alone = len(estimates) + session  # a root of its own for a session without one
    return Shared(_renumbered(session), _renumbered(np.where(root >= 0, root, alone)), tokens.astype(np.int64))


class _Tree:
    """Nodes are numbered over all levels; each hash of a sketch is one node."""

    def __init__(self, prompts: Prompts) -> None:
        rows = len(prompts.depth)
        self.node = np.full((rows, LEVELS), -1, dtype=np.int64)
        self.level: Nodes = np.zeros(0, dtype=np.int64)
        parents = []
        for level in range(LEVELS):
            here = np.flatnonzero(prompts.depth > level)
            first = len(self.level)
            found, inverse = np.unique(prompts.sketch[here, level], return_inverse=True)
            self.node[here, level] = first + inverse
            self.level = np.concatenate([self.level, np.full(len(found), level)])
            parent = np.full(len(found), -1, dtype=np.int64)
            if level:
                parent[inverse] = self.node[here, level - 1]
            parents.append(parent)
        self.parent = np.concatenate(parents)
        self.nodes = len(self.level)
        self.prompts = _count(self.node[self.node >= 0], self.nodes)
        self.branches = _count(self.parent[self.parent >= 0], self.nodes) >= 2

    def deepest(self, marked: NDArray[np.bool_]) -> Nodes:
        """For each prompt, the deepest level of its path whose node is marked; −1 if none is."""
        if not self.nodes:
            return np.full(len(self.node), -1, dtype=np.int64)
        on_path = (self.node >= 0) & marked[self.node]
        return np.where(on_path.any(axis=1), LEVELS - 1 - np.argmax(on_path[:, ::-1], axis=1), -1)

    def at(self, level: Nodes) -> Nodes:
        """Each prompt's node at its `level`; −1 where its path is shorter or the level is −1."""
        rows = np.arange(len(self.node))
        inside = (level >= 0) & (level < LEVELS)
        return np.where(inside, self.node[rows, np.clip(level, 0, LEVELS - 1)], -1)


def _chains(prompts: Prompts, tree: _Tree) -> tuple[Ints, Nodes]:
    """Session and root node of each prompt, by the shape of the tree and by whether prompts grow along a path."""
    rows = np.arange(len(prompts.depth))
    branching = tree.deepest(tree.branches)
    chain = tree.at(branching + 1)
    crowded = _crowded(chain, _sizes(prompts))
    root = np.where(crowded, tree.at(tree.deepest(tree.prompts >= 2)), tree.at(branching))
    alone = crowded | (chain < 0)
    return np.where(alone, tree.nodes + rows, chain), root


def _crowded(chain: Nodes, sizes: Floats) -> NDArray[np.bool_]:
    """Which prompts are on a path along which prompts do not grow."""
    order = np.argsort(chain, kind="stable")
    follows = np.zeros(len(chain), dtype=bool)
    follows[1:] = (np.diff(chain[order]) == 0) & (chain[order][1:] >= 0)
    shrinks = np.zeros(len(chain), dtype=bool)
    shrinks[1:] = follows[1:] & (np.diff(sizes[order]) < 0)
    group = np.cumsum(~follows) - 1
    share = np.bincount(group, shrinks) / np.maximum(1, np.bincount(group, follows)) if len(chain) else np.zeros(0)
    crowded = np.zeros(len(chain), dtype=bool)
    crowded[order] = share[group] > CROWDED
    return crowded


def _root_tokens(prompts: Prompts, tree: _Tree, root: Nodes, begins: NDArray[np.bool_]) -> Floats:
    """For each node, how long the root is that ends there: what caches held of it, else the middle of what can be."""
    per_block = tokens_per_block(prompts)
    blocks = np.exp2(tree.level)
    low, high = blocks * per_block, 2 * blocks * per_block
    has_root = root >= 0
    np.minimum.at(high, root[has_root], prompts.tokens[has_root] - 1)
    low = np.minimum(low, high)
    estimates = np.asarray((low + high) / 2)
    usable = np.flatnonzero(has_root & begins & ~np.isnan(prompts.cached_tokens))
    held = prompts.cached_tokens[usable]
    within = (held >= 0.9 * low[root[usable]]) & (held <= high[root[usable]])
    for node, values in _grouped(root[usable][within], held[within]):
        # Prompts that extend another find more than the root: most often the lower values are the root itself.
        estimates[node] = max(low[node], float(np.quantile(values, 0.25)))
    return np.maximum(estimates, 0.0)


def tokens_per_block(prompts: Prompts) -> float:
    """Typical prompt tokens in one block of the bytes that hashes are made of."""
    known = (prompts.nbytes >= BLOCK_BYTES) & (prompts.tokens > 0)
    if not known.any():
        return TOKENS_PER_BLOCK
    return float(np.median(prompts.tokens[known] * BLOCK_BYTES / prompts.nbytes[known]))


def _with_first_turns(prompts: Prompts, tree: _Tree, session: Ints, root: Nodes, estimates: Floats) -> Ints:
    """Sessions that have their first turns back: those end inside the root, and so look alone."""
    begins = np.flatnonzero((root >= 0) & _begins(session))
    if not len(begins):
        return session
    inside = session >= tree.nodes
    beyond = prompts.cached_tokens > 1.05 * np.where(root >= 0, estimates[root], 0.0) + 16
    told = begins[~np.isnan(prompts.cached_tokens[begins])]
    inside_extend = _some(beyond[told[inside[told]]], unknown=False)
    chains_extend = _some(beyond[told[~inside[told]]], unknown=True)
    extends = beyond | np.where(inside, inside_extend, chains_extend)
    turns = _Turns(prompts, beyond)
    joins = np.arange(int(session.max()) + 1)
    for row in begins.tolist():
        waiting = turns.at(int(root[row]))
        turn = turns.extended_by(row, waiting) if extends[row] and waiting else None
        if turn is not None:
            waiting.remove(turn)
            joins[session[row]] = joins[session[turn]]
        if inside[row]:
            waiting.append(row)
            del waiting[:-OPEN_TURNS]
    return joins[session]


def _some(beyond: NDArray[np.bool_], *, unknown: bool) -> bool:
    return float(beyond.mean()) >= EXTENDS if len(beyond) else unknown


class _Turns:
    """First turns by root that no other has been found to extend. Lists, as single numbers of arrays are slow."""

    def __init__(self, prompts: Prompts, beyond: NDArray[np.bool_]) -> None:
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        self._tokens = prompts.tokens.tolist()
        self._total = prompts.total_tokens.tolist()
        self._cached = prompts.cached_tokens.tolist()
        self._beyond = beyond.tolist()

    def at(self, root: int) -> list[int]:
        return self._waiting[root]

    def extended_by(self, row: int, waiting: Sequence[int]) -> int | None:
        """The turn this prompt most likely goes on from: what a cache held of it tells, else the oldest that fits."""
        total, tokens = self._total, self._tokens[row]
        fitting = [turn for turn in waiting if total[turn] <= tokens]
        if not fitting or not self._beyond[row]:
            return fitting[0] if fitting else None
        held = self._cached[row]
        return min(fitting, key=lambda turn: abs(float(total[turn]) - held))


def _begins(session: Ints) -> NDArray[np.bool_]:
    """Which prompts are the first of their session."""
    first = np.zeros(len(session), dtype=bool)
    first[np.unique(session, return_index=True)[1]] = True
    return first


def _sizes(prompts: Prompts) -> Floats:
    """Bytes as the router counted them at arrival, which are exact; tokens where nothing else is known."""
    return np.where(prompts.nbytes > 0, prompts.nbytes, prompts.tokens * BLOCK_BYTES / TOKENS_PER_BLOCK)


def _grouped(keys: Nodes, values: Floats) -> list[tuple[int, Floats]]:
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    return list(zip(found.tolist(), np.split(values[order], starts[1:]), strict=True)) if len(found) else []


def _count(nodes: Nodes, total: int) -> Ints:
    return np.bincount(nodes, minlength=total)


def _renumbered(ids: Ints) -> Ints:
    """The same groups, numbered from 0."""
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)
