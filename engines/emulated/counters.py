"""What an engine counts while it runs, and how Prometheus gets to see it. Plain numbers: a token costs no lock."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.types import EngineLoad


@dataclass(slots=True)
class Counters:
    """Totals since the process started."""

    passes: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    transfer_bytes: int = 0
    token_mismatches: int = 0
    aborts: int = 0
    expired_reservations: int = 0
    transfers: Counter[str] = field(default_factory=Counter)
    """Inbound transfers by outcome: `ok`, or the code of the error."""


class EngineCollector(Collector):
    """Reads load and counters when it is scraped."""

    def __init__(self, counters: Counters, load: Callable[[], EngineLoad], dropped_records: Callable[[], int]) -> None:
        self._counters = counters
        self._load = load
        self._dropped_records = dropped_records

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges(self._load())
        yield from self._totals(self._counters)

    def _gauges(self, load: EngineLoad) -> Iterator[Metric]:
        gauges = {
            "running": ("Requests admitted and not yet through", load.running),
            "queued": ("Requests waiting for admission", load.queued),
            "pending_prefill_tokens": ("Prompt tokens still to be computed", load.pending_prefill_tokens),
            "kv_used_tokens": ("KV room in use or pinned, tokens", load.kv_used_tokens),
            "kv_reserved_tokens": ("KV room reserved for transfers, tokens", load.kv_reserved_tokens),
            "kv_capacity_tokens": ("KV room in all, tokens", load.kv_capacity_tokens),
            "inbound_transfers": ("KV transfers that arrive now", load.inbound_transfers),
            "draining": ("1 while new work is refused", int(load.draining)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"trimtab_engine_{name}", text, value=value)

    def _totals(self, counters: Counters) -> Iterator[Metric]:
        totals = {
            "passes": ("Forward passes", counters.passes),
            "prefill_tokens": ("Prompt tokens computed", counters.prefill_tokens),
            "output_tokens": ("Tokens generated", counters.output_tokens),
            "transfer_bytes": ("Modelled bytes of KV received", counters.transfer_bytes),
            "token_mismatch": ("Requests whose caller tokenized otherwise", counters.token_mismatches),
            "aborts": ("Generations, sends and reservations stopped early", counters.aborts),
            "expired_reservations": ("Reservations that nobody used in time", counters.expired_reservations),
            "dropped_records": ("Pass and transfer records lost because Redis was away", self._dropped_records()),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"trimtab_engine_{name}", text, value=value)
        transfers = CounterMetricFamily("trimtab_engine_transfers", "KV transfers received", labels=["outcome"])
        for outcome, count in counters.transfers.items():
            transfers.add_metric([outcome], count)
        yield transfers


def register(
    registry: CollectorRegistry,
    counters: Counters,
    load: Callable[[], EngineLoad],
    dropped_records: Callable[[], int],
) -> None:
    registry.register(EngineCollector(counters, load, dropped_records))
