"""Whether copies of hot contexts would pay: asked of the reference simulator, whose context caches can be filled.

The plan in force runs a short workload twice: with what most prompts begin with on all engines that decode, and with
each of these beginnings on one of them only.
"""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np

from engines.errors import EngineError
from tuner.hot_prefixes import LEAST_TOKENS, holders, is_covered
from tuner.plan import HotPrefix
from tuner.task import SearchTask
from tuner.twin.forecast import forecast
from tuner.twin.reference import ReferenceFleet, timeline_of
from tuner.twin.types import TwinEngine
from tuner.workload import Workload

MOST_REQUESTS = 600
LEAST_GAIN = 0.02
"""Relative gain of goodput beyond which copies pay."""

Layout = Mapping[int, Sequence[str]]
"""Root → engines that hold it from the beginning."""


def worth_copying(task: SearchTask) -> tuple[HotPrefix, ...]:
    """The hot contexts that the plan in force does not have copied yet, if copies of them would pay; else nothing."""
    engines = holders(task.engines, task.plan.roles)
    new = [not is_covered(each, task.plan, engines) for each in task.hot]
    if len(engines) < 2 or not any(new):
        return ()
    workload = _short(task)
    roots = _top_roots(workload, len(task.hot))
    # Both are in order of the work they make, so they are taken for each other place by place.
    alone = {root: [engines[at % len(engines)]] if new[at] else engines for at, root in enumerate(roots)}
    now_rps = _goodput_rps(task, workload, alone)
    if _goodput_rps(task, workload, dict.fromkeys(roots, engines)) <= (1 + LEAST_GAIN) * now_rps:
        return ()
    wanted = [each for each, is_new in zip(task.hot, new, strict=True) if is_new]
    return tuple(HotPrefix(prefix=each.prefix, blocks=each.blocks, engines=engines) for each in wanted)


def _short(task: SearchTask) -> Workload:
    workload = task.workload
    span_s = min(task.settings.horizon_s, MOST_REQUESTS / max(workload.rate_rps, 1e-9))
    return workload.bootstrap(np.random.default_rng(task.seed), span_s).take(slice(0, MOST_REQUESTS))


def _top_roots(workload: Workload, most: int) -> list[int]:
    """Roots by the tokens that requests begin with, all together."""
    tokens = np.bincount(workload.root, weights=workload.root_tokens * (workload.root_tokens >= LEAST_TOKENS))
    best_first = np.argsort(-tokens, kind="stable")[:most]
    return [root for root in best_first.tolist() if tokens[root] > 0]


def _goodput_rps(task: SearchTask, workload: Workload, layout: Layout) -> float:
    fleet = [TwinEngine(engine.engine_id, engine.profile) for engine in task.engines]
    world = ReferenceFleet(fleet, task.plan, task.slos)
    for root, engine_ids in layout.items():
        tokens = int(workload.root_tokens[workload.root == root].max())
        for engine_id in engine_ids:
            with contextlib.suppress(EngineError):  # too long for this engine's memory: it does without
                world.preload(engine_id, root, tokens)
    world.offer(workload)
    timeline = timeline_of(world.advance(), world)
    return forecast(workload, timeline, task.slos, fleet, task.plan).goodput_rps
