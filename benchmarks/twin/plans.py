"""The plans that simulators are compared under: one of each family, as a fleet of any size can have it."""

from collections.abc import Callable
from typing import Any

from engines.types import Role
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, IssuedBy, Knobs, Plan, Policy
from tuner.twin.types import Fleet


def data_parallel(fleet: Fleet, **knobs: Any) -> Plan:
    return _plan(DATA_PARALLEL, {}, **knobs)


def disaggregated(fleet: Fleet, **knobs: Any) -> Plan:
    return _plan(DISAGGREGATED, _roles(fleet, 3 / 8, Role.DECODE), **knobs)


def balanced(fleet: Fleet, **knobs: Any) -> Plan:
    return _plan(BALANCED, _roles(fleet, 1 / 4, Role.MIXED), offload_ratio=0.3, **knobs)


PLANS: dict[str, Callable[[Fleet], Plan]] = {
    "data parallel by load": data_parallel,
    "data parallel by prefix": lambda fleet: data_parallel(fleet, policy=Policy.PREFIX_AFFINITY),
    "disaggregated": lambda fleet: disaggregated(fleet, policy=Policy.PREFIX_AFFINITY),
    "balanced": balanced,
}


def _roles(fleet: Fleet, share: float, others: Role) -> dict[str, Role]:
    """A share of the engines, at least one, prefills."""
    prefill = max(1, round(share * len(fleet)))
    return {engine.engine_id: Role.PREFILL if at < prefill else others for at, engine in enumerate(fleet)}


def _plan(pattern: str, roles: dict[str, Role], **knobs: Any) -> Plan:
    return Plan(
        version=1,
        issued_at_s=0,
        issued_by=IssuedBy.OPERATOR,
        reason="a benchmark",
        pattern=pattern,
        knobs=Knobs(**knobs),
        roles=roles,
    )
