"""Hot contexts: what so many prompts begin with that one engine cannot serve them all. Pure.

Told from the sketches of prompts, which have a hash for their first 1, 2, 4, 8 … blocks. So a context is known to the
half at worst: what is copied of it is never more than what is shared.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engines.types import Role
from tuner.plan import MOST_REPLICAS, HotPrefix, Plan
from tuner.sharing import LEVELS, Prompts, tokens_per_block
from tuner.types import EngineState, HotContext

LOOKED_BACK_S = 120.0
"""Traffic that contexts are looked for in: copies are for what is hot now."""

LEAST_REQUESTS = 20
LEAST_TOKENS = 512
"""Shorter contexts are prefilled in less time than a copy takes."""

ENGINES_WORTH = 1.5
"""Share of the traffic, in fair shares of one engine, from which on a context is too much for one."""

KEEPS = 0.8
"""A longer context that this share of the requests go on with stands for the shorter one."""

MOST = 8


def hot_contexts(prompts: Prompts, engines: int) -> list[HotContext]:
    """The hot contexts of these prompts for a fleet of so many engines, those with the most work first."""
    total, per_block = len(prompts.depth), tokens_per_block(prompts)
    least = max(LEAST_REQUESTS, ENGINES_WORTH * total / max(1, engines))
    nodes = [node for node in _nodes(prompts) if node.requests >= least]
    goes_on: dict[int, int] = {}
    for node in nodes:
        goes_on[node.parent] = max(node.requests, goes_on.get(node.parent, 0))
    found = [
        HotContext(
            f"{node.prefix:016x}", node.blocks, node.requests, node.requests / total, int(node.blocks * per_block)
        )
        for node in nodes
        if goes_on.get(node.prefix, 0) < KEEPS * node.requests
    ]
    long_enough = [each for each in found if each.tokens >= LEAST_TOKENS]
    return sorted(long_enough, key=lambda each: (-each.requests * each.tokens, each.prefix))[:MOST]


class _Node(NamedTuple):
    prefix: int
    blocks: int
    requests: int
    parent: int
    """Hash of its first half; 0 for a single block."""


def _nodes(prompts: Prompts) -> Iterator[_Node]:
    for level in range(LEVELS):
        here = np.flatnonzero(prompts.depth > level)
        found, first, counts = np.unique(prompts.sketch[here, level], return_index=True, return_counts=True)
        parents = prompts.sketch[here[first], level - 1] if level else np.zeros(len(found), dtype=np.uint64)
        for prefix, count, parent in zip(found.tolist(), counts.tolist(), parents.tolist(), strict=True):
            yield _Node(prefix, 1 << level, count, parent)


def holders(engines: Sequence[EngineState], roles: Mapping[str, Role]) -> tuple[str, ...]:
    """Engines that should hold hot contexts: those that decode, as these are what requests are sent to."""
    return tuple(each.engine_id for each in engines if roles.get(each.engine_id) is not Role.PREFILL)


def is_covered(context: HotContext, plan: Plan, engines: Collection[str]) -> bool:
    """Whether the plan has all these engines hold the context already."""
    wanted = {engine_id for each in plan.replicas if each.prefix == context.prefix for engine_id in each.engines}
    return wanted.issuperset(engines)


def carried(
    new: Sequence[HotPrefix], plan: Plan, hot: Sequence[HotContext], engines: tuple[str, ...]
) -> tuple[HotPrefix, ...]:
    """What the next plan is to copy to `engines`: the new ones, and of those in force what is hot still."""
    if len(engines) < 2:
        return ()
    still_hot = {each.prefix for each in hot}
    kept = [each for each in plan.replicas if each.prefix in still_hot]
    by_prefix = {each.prefix: each for each in [*kept, *new]}
    return tuple(each.model_copy(update={"engines": engines}) for each in by_prefix.values())[-MOST_REPLICAS:]
