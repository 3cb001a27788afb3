"""The page `docs/metrics.md`: every metric that Trimtab's processes export, read from the code that exports them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from controller.controller_metrics import ControllerMetrics
from controller.metrics import RouterMetrics
from controller.metrics_in_force import InForceCollector, RouterIdentity
from dashboards.samples import ENGINE_INFO, PLAN, SEEN, SLOS, VIEWS, tick
from engines.metrics import Counters, EngineCollector, Reporting
from engines.types import EngineLoad
from tuner.types import Mode

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

Written by `python -m dashboards.build` from the code; a test holds the two together. All of it is at `/metrics` of each
process. Whoever asks for OpenMetrics gets exemplars as well, the trace ids of single requests (not from a router with
several workers).

The label `model` is on none of them here: it comes from the scrape configuration, as do `job` and `instance`. Values of
labels are bounded: SLO classes, installed patterns, engines, and words from enums. Beside these every process exports
`process_*` and `python_gc_*`, except a router with several workers.

Causes of a missed bound (`tuner/blame.py`): the largest part of the time to the first token, of queue, prefill and
transfer; decode for late output; `refused` and `error` for what was not answered. What no part accounts for counts as
queue, or as error if an engine failed on the way.
"""


@dataclass(frozen=True, slots=True)
class Exported:
    """One family. `name` is as Prometheus shows it, without the suffixes of histograms."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def names(self) -> frozenset[str]:
        """As they can stand in a query."""
        if self.kind != "histogram":
            return frozenset({self.name})
        return frozenset(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))


def router_metrics() -> list[Exported]:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    registry.register(InForceCollector(RouterIdentity("router-0", "m", "0"), lambda: PLAN, lambda: SLOS, lambda: VIEWS))
    return list(_exported(registry))


def engine_metrics() -> list[Exported]:
    registry = CollectorRegistry()
    load = EngineLoad(chunked_prefill_tokens=512, prefill_decode_interval=1)
    reporting = Reporting(redis_answers=True)
    registry.register(EngineCollector(ENGINE_INFO, Counters(), lambda: load, lambda: reporting))
    return list(_exported(registry))


def controller_metrics() -> list[Exported]:
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    metrics.follow(lambda: True, lambda: 1, lambda: SEEN)
    metrics.in_force(PLAN.version, Mode.AUTO)
    metrics.ticked(tick())
    return list(_exported(registry))


def page() -> str:
    """The whole page as Markdown."""
    parts = {
        "Router": router_metrics(),
        "Engine": engine_metrics(),
        "Controller": controller_metrics(),
    }
    return HEAD + "".join(f"\n## {title}\n\n{_table(families)}" for title, families in parts.items())


def _table(families: Iterable[Exported]) -> str:
    lines = ["| name | type | labels | what |", "|---|---|---|---|"]
    lines += [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{label}`' for label in each.labels)} | {each.text} |"
        for each in families
    ]
    return "\n".join(lines) + "\n"


def _exported(registry: CollectorRegistry) -> Iterator[Exported]:
    # A family without samples does not say its labels; the object that collects it does.
    known = {
        family.name: tuple(getattr(collector, "_labelnames", ()))
        for collector in registry._collector_to_names
        for family in collector.collect()
    }
    for family in sorted(registry.collect(), key=lambda each: each.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield Exported(name, family.type, known[family.name] or _labels(family), family.documentation)


def _labels(family: Metric) -> tuple[str, ...]:
    found = {label: None for sample in family.samples for label in sample.labels if label != "le"}
    return tuple(found)
