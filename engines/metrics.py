"""What an engine counts while it runs, and how Prometheus gets to see it. Plain numbers: a token costs no lock.

Every kind of engine exports the same families, so that dashboards need not know which kind serves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as Count
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engines.types import EngineInfo, EngineLoad

Samples = Mapping[tuple[str, ...], float]
"""Values by the values of the labels that a family has beside `engine`."""


@dataclass(slots=True)
class Counters:
    """Totals since the process started."""

    passes: int = 0
    busy_prefill_s: float = 0.0
    """Of passes that prefill, whether or not they decode as well."""
    busy_decode_s: float = 0.0
    """Of passes that only decode."""
    prefill_tokens: int = 0
    output_tokens: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    token_mismatches: int = 0
    aborts: int = 0
    expired_reservations: int = 0
    spans_lost: int = 0
    transfers: Counter[str] = field(default_factory=Counter)
    """Inbound transfers by outcome: `ok`, or the code of the error."""

    def lost_spans(self, count: int) -> None:
        self.spans_lost += count

    def passed(self, wall_s: float, prefill_tokens: int) -> None:
        """One forward pass has ended."""
        self.passes += 1
        self.prefill_tokens += prefill_tokens
        if prefill_tokens:
            self.busy_prefill_s += wall_s
        else:
            self.busy_decode_s += wall_s


@dataclass(frozen=True, slots=True)
class Reporting:
    """How an engine's reports to Redis fare. `redis_answers` is `None` until it was tried."""

    records_lost: int = 0
    redis_answers: bool | None = None


class EngineCollector(Collector):
    """Reads load and counters when it is scraped."""

    def __init__(
        self,
        info: EngineInfo,
        counters: Counters,
        load: Callable[[], EngineLoad],
        reporting: Callable[[], Reporting] = Reporting,
    ) -> None:
        self._info = info
        self._counters = counters
        self._load = load
        self._reporting = reporting

    def collect(self) -> Iterator[Metric]:
        """All families; those without a sample yet are there too, so that they can be listed."""
        reporting = self._reporting()
        yield from self._state(self._load())
        yield from self._totals(self._counters)
        yield self._counter("records_lost", "Pass and transfer records lost because Redis was away too long").of(
            {(): reporting.records_lost}
        )
        up = GaugeMetricFamily("trimtab_store_up", "1 while the store answers")
        if reporting.redis_answers is not None:
            up.add_metric([], int(reporting.redis_answers))
        yield up

    def _state(self, load: EngineLoad) -> Iterator[Metric]:
        info = self._info
        yield self._gauge("info", "What serves here; always 1", "kind", "served_model").of({(info.kind, info.model): 1})
        gauges = {
            "running_requests": ("Requests admitted and not yet through", load.running),
            "queued_requests": ("Requests waiting for admission", load.queued),
            "pending_prefill_tokens": ("Prompt tokens still to be computed", load.pending_prefill_tokens),
            "kv_used_tokens": ("KV room in use or pinned", load.kv_used_tokens),
            "kv_reserved_tokens": ("KV room reserved for transfers", load.kv_reserved_tokens),
            "kv_capacity_tokens": ("KV room in all", load.kv_capacity_tokens),
            "inbound_transfers": ("KV transfers that arrive now", load.inbound_transfers),
            "draining": ("1 while new work is refused", int(load.draining)),
            "chunked_prefill_tokens": ("Most prompt tokens in one pass, now in force", load.chunked_prefill_tokens),
            "prefill_decode_interval": ("Decode passes between prefill passes", load.prefill_decode_interval),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text).of({} if value is None else {(): value})

    def _totals(self, counters: Counters) -> Iterator[Metric]:
        totals: dict[str, tuple[str, float]] = {
            "passes": ("Forward passes", counters.passes),
            "prefill_tokens": ("Prompt tokens computed", counters.prefill_tokens),
            "output_tokens": ("Tokens generated", counters.output_tokens),
            "transfer_bytes": ("Bytes of KV received; of emulated engines modelled bytes", counters.transfer_bytes),
            "transfer_seconds": ("Seconds that transfers took to arrive, added up", counters.transfer_s),
            "token_mismatch": ("Requests whose caller tokenized otherwise", counters.token_mismatches),
            "aborts": ("Generations, sends and reservations stopped early", counters.aborts),
            "expired_reservations": ("Reservations that nobody used in time", counters.expired_reservations),
            "spans_lost": ("Spans of traces that the collector did not take", counters.spans_lost),
        }
        for name, (text, value) in totals.items():
            yield self._counter(name, text).of({(): value})
        busy: Samples = {("prefill",): counters.busy_prefill_s, ("decode",): counters.busy_decode_s}
        yield self._counter("busy_seconds", "Time in passes that prefill, and in those that only decode", "work").of(
            busy
        )
        transfers: Samples = {(outcome,): float(count) for outcome, count in ({"ok": 0} | counters.transfers).items()}
        yield self._counter("transfers", "KV transfers received", "outcome").of(transfers)

    def _gauge(self, name: str, text: str, *labels: str) -> "_Family":
        metric = GaugeMetricFamily(f"trimtab_engine_{name}", text, labels=["engine", *labels])
        return _Family(metric, self._info.engine_id)

    def _counter(self, name: str, text: str, *labels: str) -> "_Family":
        metric = CounterMetricFamily(f"trimtab_engine_{name}", text, labels=["engine", *labels])
        return _Family(metric, self._info.engine_id)


@dataclass(frozen=True, slots=True)
class _Family:
    metric: GaugeMetricFamily | CounterMetricFamily
    engine_id: str

    def of(self, samples: Samples) -> Metric:
        for labels, value in samples.items():
            self.metric.add_metric([self.engine_id, *labels], value)
        return self.metric


class Mirror:
    """The families of a collector as metrics of a registry that gathers the values of several processes through files:
    such a registry takes no collectors. Does not know the families before `update` was called."""

    def __init__(self, collector: Collector, registry: CollectorRegistry) -> None:
        self._collector = collector
        self._registry = registry
        self._metrics: dict[str, Gauge | Count] = {}
        self._told: dict[tuple[str, ...], float] = {}

    def update(self) -> None:
        """Take over the values of this moment."""
        for family in self._collector.collect():
            for sample in family.samples:
                metric = self._metrics.get(family.name) or self._new(family, tuple(sample.labels))
                child = metric.labels(**sample.labels) if sample.labels else metric
                if isinstance(child, Gauge):
                    child.set(sample.value)
                else:
                    child.inc(self._grown((family.name, *sample.labels.values()), sample.value))

    def _new(self, family: Metric, labels: tuple[str, ...]) -> Gauge | Count:
        made: Gauge | Count
        if family.type == "counter":
            made = Count(family.name, family.documentation, labels, registry=self._registry)
        else:
            made = Gauge(
                family.name, family.documentation, labels, registry=self._registry, multiprocess_mode="mostrecent"
            )
        self._metrics[family.name] = made
        return made

    def _grown(self, key: tuple[str, ...], value: float) -> float:
        before = self._told.get(key, 0.0)
        self._told[key] = value
        return max(0.0, value - before)


def expose(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """A scrape's content and its type: OpenMetrics, which carries exemplars, for whoever accepts it."""
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
