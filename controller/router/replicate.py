"""Copies of hot contexts, in the background, to the engines that the plan wants to hold them.

The plan knows a context by its hash; only a router has prompts that begin with it. So a copy is made when such a
request has been answered: by then an engine holds what it began with.
"""

import enum
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

import structlog

from controller.context_copy import copy_context
from controller.metrics import RouterMetrics
from controller.router.call import Call, Desk
from controller.router.fleet import Engine, TransferSlot
from controller.router.tokens import NO_TOKENS
from engines.errors import told
from tuner.plan import Plan
from tuner.prefix import BLOCK_BYTES

log = structlog.get_logger()

MOST_AT_ONCE = 2
"""Copies under way in one router: they share links and prefill with the requests of clients."""

PAUSE_S = 30.0
"""After a copy that failed, until it is tried again."""


class Copied(enum.StrEnum):
    """How a copy ended."""

    COPIED = "copied"
    ALREADY_THERE = "already_there"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Copy:
    """One context and the engine that should have it."""

    prefix: int
    blocks: int
    engine_id: str


class Replicator:
    """Sees every request that an engine has answered. `background` runs a copy; what it starts ends with the router.

    What failed is left alone for a while, unless the engine has begun a new life since.
    """

    def __init__(
        self,
        desk: Desk,
        metrics: RouterMetrics,
        background: Callable[[Coroutine[None, None, None]], object],
        id_prefix: str,
    ) -> None:
        self._desk = desk
        self._metrics = metrics
        self._background = background
        self._id_prefix = id_prefix
        self._numbers = itertools.count(1)
        self._running: set[Copy] = set()
        self._failed: dict[Copy, tuple[str, float]] = {}
        """The epoch of the engine that it failed with, and when."""
        self.wanted: Mapping[int, Mapping[int, frozenset[str]]] = {}
        """Blocks → hash of that many → engines. Empty: nothing is to be copied, and there is no use in calling."""

    def apply(self, plan: Plan) -> None:
        """Want what the plan names, and forget what it does not name any more."""
        wanted: dict[int, dict[int, frozenset[str]]] = {}
        for hot in plan.replicas:
            of_depth = wanted.setdefault(hot.blocks, {})
            of_depth[hot.block_hash] = of_depth.get(hot.block_hash, frozenset()) | frozenset(hot.engines)
        self.wanted = wanted
        self._failed = {copy: when for copy, when in self._failed.items() if self._is_wanted(copy)}

    def passed(self, call: Call) -> None:
        """A request was answered: if it begins with a wanted context, give that to the engines that lack it."""
        for blocks, of_depth in self.wanted.items():
            if len(call.hashes) >= blocks and (engines := of_depth.get(call.hashes[blocks - 1])):
                self._spread(call, blocks, engines)

    def _spread(self, call: Call, blocks: int, engines: frozenset[str]) -> None:
        held = self._desk.prefixes.match(call.hashes[:blocks])
        for engine_id in sorted(engines):
            copy = Copy(call.hashes[blocks - 1], blocks, engine_id)
            target = self._desk.fleet.get(engine_id)
            if held.get(engine_id, 0) >= blocks or target is None or not self._may_start(copy, target, call):
                continue
            source = self._source(held, call, target)
            if source is not None:
                self._running.add(copy)
                self._background(self._copy(copy, call, source, target))

    def _may_start(self, copy: Copy, target: Engine, call: Call) -> bool:
        if not call.asked.splittable or copy in self._running or len(self._running) >= MOST_AT_ONCE:
            return False
        if not target.view.available or target.own_transfers >= call.plan.knobs.max_inflight_transfers:
            return False
        epoch, failed_s = self._failed.get(copy, ("", 0.0))
        return epoch != target.info.epoch or self._desk.now_s() - failed_s >= PAUSE_S

    def _source(self, held: Mapping[str, int], call: Call, target: Engine) -> Engine | None:
        """The engine that holds most of it, of equals the one with least to do; else the one that has just answered."""
        others = [engine for engine in self._desk.fleet if engine is not target and engine.view.available]
        holding = [engine for engine in others if held.get(engine.engine_id)]
        if not holding:
            return next((engine for engine in others if engine.engine_id == call.decode_engine), None)
        return min(holding, key=lambda engine: (-held[engine.engine_id], engine.view.load_tokens))

    async def _copy(self, copy: Copy, call: Call, source: Engine, target: Engine) -> None:
        request_id = f"{self._id_prefix}-copy-{next(self._numbers):x}"
        slot = TransferSlot(target)
        try:
            outcome = await self._try(request_id, copy, call, source, target)
        finally:
            self._running.discard(copy)
            slot.release()
            self._desk.room.wake()
        self._metrics.replications.labels(outcome.value).inc()

    async def _try(self, request_id: str, copy: Copy, call: Call, source: Engine, target: Engine) -> Copied:
        said = call.log.bind(copy_id=request_id, prefix=f"{copy.prefix:016x}", source=source.engine_id)
        try:
            prompt = await call.tokenize()
            end = _tokens(copy.blocks, prompt.tokens, len(call.asked.content))
            with call.span.step("copy context") as step:
                moved = await copy_context(request_id, source.client, target.client, prompt, end, step.trace)
        except NO_TOKENS as error:
            self._failed[copy] = (target.info.epoch, self._desk.now_s())
            said.warning("context_not_copied", target=target.engine_id, error=told(error))
            return Copied.FAILED
        self._failed.pop(copy, None)
        if self._desk.fleet.get(target.engine_id) is target:  # else it left meanwhile, and a new life holds nothing
            self._desk.prefixes.add(call.hashes[: copy.blocks], target.engine_id)
        said.info("context_copied", target=target.engine_id, tokens=moved.moved_tokens, bytes=moved.bytes)
        return Copied.COPIED if moved.moved_tokens else Copied.ALREADY_THERE

    def _is_wanted(self, copy: Copy) -> bool:
        return copy.engine_id in self.wanted.get(copy.blocks, {}).get(copy.prefix, frozenset())


def _tokens(blocks: int, prompt_tokens: int, content_bytes: int) -> int:
    """How many of the prompt's tokens its first blocks come to, if they spread evenly over its bytes."""
    share = blocks * BLOCK_BYTES * prompt_tokens // max(1, content_bytes)
    return max(1, min(share, prompt_tokens - 1))
