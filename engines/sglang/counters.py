"""What the engine counts, for Prometheus. Names as the emulated engine's."""

from collections.abc import Callable, Iterator

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from engines.sglang.messages import Totals
from engines.types import EngineLoad

PREFIX = "trimtab_engine_"
GAUGES = {
    "running": "Requests admitted and not yet through",
    "queued": "Requests waiting for admission",
    "pending_prefill_tokens": "Prompt tokens still to be computed",
    "kv_used_tokens": "KV room in use or pinned, tokens",
    "kv_reserved_tokens": "KV room reserved for transfers, tokens",
    "kv_capacity_tokens": "KV room in all, tokens",
    "inbound_transfers": "KV transfers that arrive now",
    "draining": "1 while new work is refused",
}
TOTALS = {
    "passes": "Forward passes",
    "prefill_tokens": "Prompt tokens computed",
    "output_tokens": "Tokens generated",
    "transfer_bytes": "Bytes of KV received",
    "token_mismatch": "Requests whose caller tokenized otherwise",
    "aborts": "Generations, sends and reservations stopped early",
    "expired_reservations": "Reservations that nobody used in time",
    "dropped_records": "Pass and transfer records lost because Redis was away",
}


class Counters:
    """What only the HTTP process knows, and the last that the scheduler told."""

    def __init__(self, dropped_records: Callable[[], int]) -> None:
        self.token_mismatches = 0
        self.aborts = 0
        self.totals = Totals()
        self.load = EngineLoad()
        self._dropped_records = dropped_records

    def values(self) -> dict[str, float]:
        totals = self.totals
        return {
            "passes": totals.passes,
            "prefill_tokens": totals.prefill_tokens,
            "output_tokens": totals.output_tokens,
            "transfer_bytes": totals.transfer_bytes,
            "token_mismatch": self.token_mismatches,
            "aborts": self.aborts,
            "expired_reservations": totals.expired_reservations,
            "dropped_records": self._dropped_records(),
        }


class EngineCollector(Collector):
    """For a registry of this process."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=float(getattr(self._counters.load, name)))
        values = self._counters.values()
        for name, text in TOTALS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=values[name])
        transfers = CounterMetricFamily(PREFIX + "transfers", "KV transfers received", labels=["outcome"])
        for outcome, count in self._counters.totals.transfers.items():
            transfers.add_metric([outcome], count)
        yield transfers


class SharedMetrics:
    """The same numbers among SGLang's own, which it gathers over its processes through files."""

    def __init__(self, counters: Counters, registry: CollectorRegistry) -> None:
        self._counters = counters
        self._gauges = {
            name: Gauge(PREFIX + name, text, registry=registry, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._totals = {name: Counter(PREFIX + name, text, registry=registry) for name, text in TOTALS.items()}
        self._transfers = Counter(PREFIX + "transfers", "KV transfers received", ["outcome"], registry=registry)
        self._told: dict[str, float] = {}

    def update(self) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(float(getattr(self._counters.load, name)))
        for name, value in self._counters.values().items():
            self._totals[name].inc(self._grown(name, value))
        for outcome, count in self._counters.totals.transfers.items():
            self._transfers.labels(outcome).inc(self._grown("transfers " + outcome, count))

    def _grown(self, name: str, value: float) -> float:
        before = self._told.get(name, 0.0)
        self._told[name] = value
        return max(0.0, value - before)
