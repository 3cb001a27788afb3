"""What a router goes by, for Prometheus: its plan with every knob, the SLOs, and the engines as it sees them.

Read when it is scraped, as these are documents and not counts: what is no longer in force is no longer shown. Of
several workers each answers for itself.
"""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.types import Role
from tuner.placement import EngineView
from tuner.plan import Knobs, Plan
from tuner.slo import SloTable

Sample = tuple[dict[str, str], float]
"""Labels and value."""


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    router_id: str
    model: str
    version: str
    """Of the software."""


class InForceCollector(Collector):
    """The collaborators are asked at each scrape."""

    def __init__(
        self,
        identity: RouterIdentity,
        plan: Callable[[], Plan],
        slos: Callable[[], SloTable],
        engines: Callable[[], Iterable[EngineView]],
    ) -> None:
        self._identity = identity
        self._plan = plan
        self._slos = slos
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """All families; those without a sample are there too, so that they can be listed."""
        me = self._identity
        labels = {"router_id": me.router_id, "served_model": me.model, "version": me.version}
        yield _gauge("router_info", "What serves here; always 1", (labels, 1.0))
        yield from _plan(self._plan())
        yield from _slos(self._slos())
        yield from _engines(list(self._engines()))


def _plan(plan: Plan) -> Iterator[Metric]:
    who = {"pattern": plan.pattern, "issued_by": plan.issued_by.value}
    words = {name: str(value) for name, value in plan.knobs if isinstance(value, enum.Enum)}
    yield _gauge("plan_info", "Pattern, issuer and worded knobs of the plan in force; always 1", (who | words, 1.0))
    issued = ((who, plan.issued_at_s),) if plan.issued_at_s else ()
    yield _gauge("plan_issued_timestamp_seconds", "When the plan in force was issued", *issued)
    for name, field in Knobs.model_fields.items():
        value = getattr(plan.knobs, name)
        if not isinstance(value, enum.Enum):
            samples: list[Sample] = [({}, float(value))] if value is not None else []
            yield _gauge(f"plan_{name}", field.description or name, *samples)


def _slos(slos: SloTable) -> Iterator[Metric]:
    classes = [({"slo_class": name}, slo) for name, slo in slos.classes.items()]
    yield _gauge("slo_version", "Version of the SLO table in force", ({}, float(slos.version)))
    yield _gauge(
        "slo_ttft_bound_seconds", "Bound on the time to first token", *((of, slo.ttft_ms / 1e3) for of, slo in classes)
    )
    yield _gauge(
        "slo_tpot_bound_seconds", "Bound on the time per token", *((of, slo.tpot_ms / 1e3) for of, slo in classes)
    )
    yield _gauge(
        "slo_attainment_target_ratio",
        "Share of requests that must meet both bounds",
        *((of, slo.attainment) for of, slo in classes),
    )
    yield _gauge("slo_weight", "Worth of one good request", *((of, slo.weight) for of, slo in classes))


def _engines(engines: list[EngineView]) -> Iterator[Metric]:
    yield _gauge(
        "engine_role",
        "What the plan in force uses an engine for; 1 for that role",
        *(({"engine": each.engine_id, "role": each.role.value}, 1.0) for each in engines),
    )
    yield _gauge(
        "pool_engines",
        "Engines that can be used, by role",
        *(({"role": role.value}, float(sum(e.available and e.role is role for e in engines))) for role in Role),
    )
    yield _gauge(
        "engine_available",
        "1 while an engine answers this router and does not drain",
        *(({"engine": each.engine_id}, float(each.available)) for each in engines),
    )
    yield _gauge(
        "engine_prefill_rate_tokens_per_second",
        "Prompt tokens per second that an engine says it computes while prompts wait",
        *(({"engine": e.engine_id}, e.prefill_tokens_per_s) for e in engines if e.prefill_tokens_per_s is not None),
    )


def _gauge(name: str, text: str, *samples: Sample) -> Metric:
    metric = GaugeMetricFamily(f"trimtab_{name}", text)
    for labels, value in samples:
        metric.add_sample(metric.name, labels, value)
    return metric
