"""Candidates: plans without a place in history. How they become plans, and which ones are tried first."""

from collections.abc import Iterator, Mapping, Sequence

from engines.types import Role
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, IssuedBy, Knobs, Plan, Policy
from tuner.types import Candidate, EngineState

STATIC_RATIOS = (0.0, 0.1, 0.2, 0.3)
"""Offload ratios that an operator would choose from by hand."""


def candidate_of(plan: Plan, engines: Sequence[EngineState]) -> Candidate:
    """What a plan comes to on the engines that are there."""
    roles = [plan.role_of(engine.engine_id) for engine in engines]
    return Candidate(
        pattern=plan.pattern,
        knobs=plan.knobs,
        prefill_engines=roles.count(Role.PREFILL),
        decode_engines=roles.count(Role.DECODE),
        mixed_engines=roles.count(Role.MIXED),
    )


def plan_of(candidate: Candidate, engines: Sequence[EngineState], current: Mapping[str, Role] | None = None) -> Plan:
    """The candidate as a plan of version 0, with as few role changes as it can be had."""
    return Plan(
        version=0,
        issued_at_s=0,
        issued_by=IssuedBy.TUNER,
        reason="candidate",
        pattern=candidate.pattern,
        knobs=candidate.knobs,
        roles=assign_roles(candidate, engines, current or {}),
    )


def assign_roles(candidate: Candidate, engines: Sequence[EngineState], current: Mapping[str, Role]) -> dict[str, Role]:
    """A role for each engine: those that have a wanted role keep it, then the fastest at prefill come to prefill.

    Raises `ValueError` if the counts do not add up to the fleet.
    """
    wanted = {
        Role.PREFILL: candidate.prefill_engines,
        Role.DECODE: candidate.decode_engines,
        Role.MIXED: candidate.mixed_engines,
    }
    if sum(wanted.values()) != len(engines):
        raise ValueError(f"roles for {sum(wanted.values())} engines, but there are {len(engines)}")
    quickest_first = sorted(engines, key=lambda engine: (engine.profile.b_s_per_token, engine.engine_id))
    roles: dict[str, Role] = {}
    for engine in quickest_first:
        role = current.get(engine.engine_id, Role.MIXED)
        if wanted[role]:
            roles[engine.engine_id] = role
            wanted[role] -= 1
    free = iter([role for role in (Role.PREFILL, Role.MIXED, Role.DECODE) for _ in range(wanted[role])])
    for engine in quickest_first:
        if engine.engine_id not in roles:
            roles[engine.engine_id] = next(free)
    return roles


def region(candidate: Candidate) -> str:
    """Candidates that err alike: the pattern, its ratio in steps of a quarter, and the prefill share in quarters."""
    engines = candidate.prefill_engines + candidate.decode_engines + candidate.mixed_engines
    share = round(4 * candidate.prefill_engines / max(1, engines))
    return f"{candidate.pattern}/{round(4 * candidate.knobs.offload_ratio)}/{share}"


def split(engines: int, prefill: int, ratio: float, knobs: Knobs, mixed: int = 0) -> Candidate:
    """A split pattern on a fleet of `engines`, of which `prefill` prefill and `mixed` do both."""
    pattern = BALANCED if ratio > 0 else DISAGGREGATED
    knobs = knobs.model_copy(update={"offload_ratio": ratio})
    return Candidate(pattern, knobs, prefill, engines - prefill - mixed, mixed)


def data_parallel(engines: int, knobs: Knobs) -> Candidate:
    return Candidate(DATA_PARALLEL, knobs.model_copy(update={"offload_ratio": 0.0}), 0, 0, engines)


def explicit_knobs(engines: Sequence[EngineState]) -> Knobs:
    """Default knobs with what engines start with spelt out: leaving it out would keep whatever was set last."""
    profile = engines[0].profile
    return Knobs(
        chunked_prefill_tokens=profile.chunked_prefill_tokens, prefill_decode_interval=profile.prefill_decode_interval
    )


def oddities(candidate: Candidate, defaults: Knobs) -> int:
    """How many knobs differ from `defaults`, the split ratio aside; a knob left alone does not differ."""
    given, plain = candidate.knobs.model_dump(), defaults.model_dump()
    return sum(given[name] not in (None, plain[name]) for name in plain if name != "offload_ratio")


def static_baselines(engines: Sequence[EngineState], most_splits: int = 8) -> Iterator[Candidate]:
    """What one would run by hand: each data parallel policy, and each split ratio over a range of role splits."""
    knobs, count = explicit_knobs(engines), len(engines)
    for policy in (Policy.LEAST_LOAD, Policy.PREFIX_AFFINITY):
        yield data_parallel(count, knobs.model_copy(update={"policy": policy}))
    for prefill in prefill_counts(count, most_splits):
        for ratio in STATIC_RATIOS:
            yield split(count, prefill, ratio, knobs)


def prefill_counts(engines: int, most: int) -> list[int]:
    """At most `most` numbers of prefill engines, spread over 1 to `engines` - 1."""
    possible = engines - 1
    step = max(1, -(-possible // most))
    return list(range(1, engines, step)) if possible > 0 else []
