"""Where one request goes: a pure function of the plan, the engines' loads and what is cached where.

The router calls this for every request and the simulator for every simulated one, so both place alike.
"""

import enum
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engines.types import Role
from tuner.plan import DATA_PARALLEL, Admission, Plan, Policy
from tuner.slo import Slo

REQUEST_TOKENS = 64
"""What a request in flight counts for, in prompt tokens, when loads are compared.

A decoding request slows each of its neighbour's passes a little, for as long as it runs. The exact worth depends on
the hardware; it only has to be small beside a prompt and above nothing."""

MAX_CANDIDATES = 8
"""Engines ranked per request. More would only be tried after that many refusals in a row."""

AFFINITY_SHARE = 0.5
"""A decode engine that holds at least this share of the prompt is preferred over one with more free KV."""


@dataclass(slots=True)
class EngineView:
    """What a placer knows of one engine. Kept up to date by its owner; `place` only reads it.

    `inflight` and `pending_prefill_tokens` are the larger of the placer's own count and the engine's report: reports
    go stale behind a long prefill, and the own count does not see other routers' work.
    """

    engine_id: str
    role: Role = Role.MIXED
    available: bool = True
    inflight: int = 0
    pending_prefill_tokens: int = 0
    kv_free_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    """The engine's own measure; `None` until it has one."""

    @property
    def load_tokens(self) -> int:
        return self.pending_prefill_tokens + REQUEST_TOKENS * self.inflight

    def prefill_wait_s(self, tokens: int) -> float | None:
        """Seconds until a prompt of `tokens` uncached tokens that arrives now is prefilled here, if known."""
        if not self.prefill_tokens_per_s:
            return None
        return (self.pending_prefill_tokens + tokens) / self.prefill_tokens_per_s


class PlacementRequest(NamedTuple):
    """`cached_tokens` is a hint from the prefix index; engines have the last word when they match the prompt."""

    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    avoid: frozenset[str] = frozenset()
    """Engines that already failed this request."""
    splittable: bool = True

    def uncached_on(self, engine_id: str) -> int:
        return max(1, self.prompt_tokens - self.cached_tokens.get(engine_id, 0))


class Placement(NamedTuple):
    """Engines to decode on, best first, and where the prompt is split; no `prefill` means no split."""

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    end: int | None = None

    @property
    def is_split(self) -> bool:
        return bool(self.prefill) and self.end is not None


class Verdict(enum.Enum):
    ADMIT = "admit"
    WAIT = "wait"
    SHED = "shed"


def place(plan: Plan, request: PlacementRequest, engines: Sequence[EngineView], turn: int) -> Placement:
    """Rank the engines for one request. `turn` counts requests, for round robin. Empty `decode`: nobody can serve.

    Every pattern but `data_parallel` gets a split where one pays, a user's own included.
    """
    decode = _rank_decode(plan, request, _able(engines, request, Role.PREFILL), turn)
    if not decode or plan.pattern == DATA_PARALLEL or not _worth_splitting(plan, request, decode[0]):
        return Placement(tuple([view.engine_id for view in decode]))  # a list comprehension is the cheaper one
    prefill = _rank_prefill(request, _able(engines, request, Role.DECODE), decode[0])
    return Placement(
        decode=tuple(view.engine_id for view in decode),
        prefill=tuple(view.engine_id for view in prefill),
        end=split_end(request.prompt_tokens, plan.knobs.offload_ratio) if prefill else None,
    )


def split_end(prompt_tokens: int, offload_ratio: float) -> int:
    """`ceil((1 - r) · n)`, at least 1 and at most n - 1: the last token is always the decode engine's."""
    return max(1, min(prompt_tokens - 1, math.ceil((1 - offload_ratio) * prompt_tokens)))


def admit(plan: Plan, slo: Slo, request: PlacementRequest, decode: EngineView, prefill: EngineView) -> Verdict:
    """Whether a request may start on the engines that rank first for it; without a split both are the same."""
    knobs = plan.knobs
    if knobs.admission is Admission.OFF:
        return Verdict.ADMIT
    if knobs.admission is Admission.SHED:
        wait_s = prefill.prefill_wait_s(request.uncached_on(prefill.engine_id))
        return Verdict.SHED if wait_s is not None and wait_s * 1e3 > slo.ttft_ms else Verdict.ADMIT
    full = knobs.max_running_per_engine is not None and decode.inflight >= knobs.max_running_per_engine
    return Verdict.WAIT if full else Verdict.ADMIT


def _able(engines: Sequence[EngineView], request: PlacementRequest, barred: Role) -> list[EngineView]:
    """Engines that may take this request in a role other than `barred`; if the roles leave none, any that is up.

    Roles are a preference: a fleet whose decode engines are all gone still answers.
    """
    up = [view for view in engines if view.available and view.engine_id not in request.avoid]
    return [view for view in up if view.role is not barred] or up


def _rank_decode(plan: Plan, request: PlacementRequest, engines: list[EngineView], turn: int) -> list[EngineView]:
    if plan.knobs.policy is Policy.ROUND_ROBIN:
        first = turn % len(engines) if engines else 0
        return (engines[first:] + engines[:first])[:MAX_CANDIDATES]
    if plan.pattern != DATA_PARALLEL:
        return _best(engines, _decode_cost(plan, request, engines))
    if plan.knobs.policy is Policy.PREFIX_AFFINITY:
        return _best(engines, lambda view: view.load_tokens + request.uncached_on(view.engine_id))
    return _best(engines, lambda view: view.load_tokens)


def _decode_cost(
    plan: Plan, request: PlacementRequest, engines: list[EngineView]
) -> Callable[[EngineView], tuple[bool, bool, int]]:
    """Most free KV among those within the load bound, unless prefix affinity is worth more."""
    bound = 2 + 1.25 * sum(view.inflight for view in engines) / max(1, len(engines))
    wants_affinity = plan.knobs.policy is Policy.PREFIX_AFFINITY
    worthwhile = AFFINITY_SHARE * request.prompt_tokens

    def cost(view: EngineView) -> tuple[bool, bool, int]:
        cached = wants_affinity and request.cached_tokens.get(view.engine_id, 0) >= worthwhile
        return view.inflight > bound, not cached, -view.kv_free_tokens

    return cost


def _worth_splitting(plan: Plan, request: PlacementRequest, decode: EngineView) -> bool:
    """A short or mostly cached prompt skips the prefill engine."""
    if not request.splittable or request.prompt_tokens < 2:
        return False
    cached = request.cached_tokens.get(decode.engine_id, 0)
    if request.prompt_tokens - cached < plan.knobs.min_remote_tokens:
        return False
    return cached < plan.knobs.bypass_cached_fraction * request.prompt_tokens


def _rank_prefill(request: PlacementRequest, engines: list[EngineView], decode: EngineView) -> list[EngineView]:
    """Shortest time until this prompt would be prefilled, its own uncached part included."""
    others = [view for view in engines if view is not decode]
    if all(view.prefill_tokens_per_s for view in others):
        return _best(others, lambda view: view.prefill_wait_s(request.uncached_on(view.engine_id)) or 0.0)
    return _best(others, lambda view: view.load_tokens + request.uncached_on(view.engine_id))


def _best(engines: list[EngineView], cost: Callable[[EngineView], float | tuple[bool, bool, int]]) -> list[EngineView]:
    """The cheapest engines, in order; equal ones keep the order they were given in."""
    if len(engines) <= MAX_CANDIDATES:
        return sorted(engines, key=cost)
    return heapq.nsmallest(MAX_CANDIDATES, engines, key=cost)
