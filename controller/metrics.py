"""What a router counts for Prometheus. The registry is given; label values are bounded by settings, plans and enums.

`slo_class` and `pattern` are those of the request; what the plan and the SLOs themselves say is in `metrics_in_force`.
"""

import re
from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Exemplar

from engines.records import Outcome, RequestRecord
from tuner.blame import PARTS, Bound, Cause, Miss, misses
from tuner.plan import Plan
from tuner.slo import DEFAULT_CLASS, Slo

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60)
TPOT_BUCKETS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)
TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

NO_PATTERN = "none"
"""Of requests that were not understood well enough to be placed."""

Mode = Literal["livesum", "livemin"]
"""How several workers' values make one."""

BATCH = 64
"""Requests counted at once. One by one, the code and data of counting would be out of the caches each time; more than
this would hold up streams."""

SOURCES = ("cached", "remote", "local")
SAMPLED_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f][13579bdf]")


def trace_id_of(traceparent: bytes | None) -> str | None:
    """The trace that a request belongs to, if it is one that is kept: an exemplar should lead somewhere."""
    found = SAMPLED_TRACE.fullmatch(traceparent) if traceparent is not None else None
    return found[1].decode() if found is not None else None


class _Tally:
    """A histogram's observations between two folds. Counting here costs a tenth of observing in the library, which
    locks and walks its buckets each time and has no call for many observations at once."""

    def __init__(self, series: Histogram, bounds: Sequence[float]) -> None:
        self._series = series
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str | None = None, at_s: float = 0.0) -> None:
        """`trace_id` becomes the exemplar of the value's bucket; `at_s` is Unix time."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if trace_id is not None:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, at_s)

    def fold(self) -> None:
        """Hand everything to the library and begin anew."""
        for at, count in enumerate(self._counts):
            if count:
                self._series._buckets[at].inc(count)
                self._counts[at] = 0
        self._series._sum.inc(self._sum)
        self._sum = 0.0
        for at, exemplar in self._exemplars.items():
            self._series._buckets[at].set_exemplar(exemplar)
        self._exemplars.clear()


class _Series:
    """The series of one SLO class under one pattern, looked up once: finding a labelled child costs more than counting
    on it."""

    def __init__(self, metrics: "RouterMetrics", slo_class: str, pattern: str) -> None:
        labels = (slo_class, pattern)
        self._by_outcome = {outcome: metrics.requests.labels(*labels, outcome.value) for outcome in Outcome}
        self._by_miss = {
            (bound, cause): metrics.violations.labels(*labels, bound.value, cause.value)
            for bound in Bound
            for cause in Cause
            # Output that is late is late in decoding, whatever came before.
            if bound is Bound.TTFT or cause in (Cause.DECODE, Cause.REFUSED, Cause.ERROR)
        }
        self._by_part = [metrics.part_seconds.labels(*labels, part.value) for part in PARTS]
        self._by_source = [metrics.prompt_tokens.labels(*labels, source) for source in SOURCES]
        self._good = metrics.good.labels(*labels)
        self._output_tokens = metrics.output_tokens.labels(*labels)
        self.outcomes: Counted[Outcome] = Counted()
        self.misses: Counted[Miss] = Counted()
        self.parts_s = [0.0] * len(PARTS)
        self.prompt_tokens = [0] * len(SOURCES)
        self.output_tokens = 0
        self.answered = 0
        self.good = 0
        self.ttft = _Tally(metrics.ttft.labels(*labels), TTFT_BUCKETS_S)
        self.tpot = _Tally(metrics.tpot.labels(*labels), TPOT_BUCKETS_S)
        self.e2e = _Tally(metrics.e2e.labels(*labels), E2E_BUCKETS_S)

    def finished(self, record: RequestRecord, slo: Slo, trace_id: str | None) -> None:
        if record.outcome is not Outcome.OK:
            self.outcomes[record.outcome] += 1
            self._missed(record, slo)
            return
        self.answered += 1
        if slo.met(record.ttft_s, record.tpot_s):
            self.good += 1
        else:
            self._missed(record, slo)
        self._observe(record, trace_id)
        self._add_parts(record)
        self._add_tokens(record)

    def _missed(self, record: RequestRecord, slo: Slo) -> None:
        for miss in misses(record, slo):
            self.misses[miss] += 1

    def _observe(self, record: RequestRecord, trace_id: str | None) -> None:
        at_s = record.arrived_at_s + record.e2e_s
        self.e2e.observe(record.e2e_s, trace_id, at_s)
        if record.ttft_s is not None:
            self.ttft.observe(record.ttft_s, trace_id, at_s)
        if record.tpot_s is not None:
            self.tpot.observe(record.tpot_s, trace_id, at_s)

    def _add_parts(self, record: RequestRecord) -> None:
        parts_s = self.parts_s
        parts_s[0] += record.queue_s or 0.0
        parts_s[1] += record.prefill_s or 0.0
        parts_s[2] += record.transfer_s or 0.0
        parts_s[3] += record.decode_s or 0.0

    def _add_tokens(self, record: RequestRecord) -> None:
        """What the decode engine found in its cache came from another engine if it was sent for this request."""
        self.output_tokens += record.output_tokens or 0
        if record.prompt_tokens is None or record.cached_tokens is None:
            return
        remote = 0
        if record.transferred_bytes and record.split_begin is not None and record.split_end is not None:
            remote = min(record.split_end - record.split_begin, record.cached_tokens)
        tokens = self.prompt_tokens
        tokens[0] += record.cached_tokens - remote
        tokens[1] += remote
        tokens[2] += max(0, record.prompt_tokens - record.cached_tokens)

    def fold(self) -> None:
        for outcome, count in self.outcomes.items():
            self._by_outcome[outcome].inc(count)
        for miss, count in self.misses.items():
            self._by_miss[miss].inc(count)
        self._by_outcome[Outcome.OK].inc(self.answered)
        self.outcomes.clear()
        self.misses.clear()
        for at, series in enumerate(self._by_part):
            series.inc(max(0.0, self.parts_s[at]))  # engines tell them, and a counter takes nothing below 0
            self.parts_s[at] = 0.0
        for at, series in enumerate(self._by_source):
            series.inc(max(0, self.prompt_tokens[at]))
            self.prompt_tokens[at] = 0
        self._output_tokens.inc(max(0, self.output_tokens))
        self._good.inc(self.good)
        self.output_tokens = self.answered = self.good = 0
        for tally in (self.ttft, self.tpot, self.e2e):
            tally.fold()


class RouterMetrics:
    """Counts on the hot path go into plain numbers; `fold` brings them into the registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        of_request = ("slo_class", "pattern")
        self.received = self._counter(
            "received_requests", "Requests that were understood, at their arrival", "slo_class"
        )
        self.requests = self._counter("requests", "Finished requests", *of_request, "outcome")
        self.good = self._counter("good_requests", "Requests that met both their TTFT and TPOT bound", *of_request)
        self.violations = self._counter(
            "slo_violations",
            "Requests that missed a bound, by what that is put down to; one that was refused or failed missed both",
            *(*of_request, "bound", "cause"),
        )
        self.ttft = self._histogram("ttft_seconds", "Time to first token", TTFT_BUCKETS_S, *of_request)
        self.tpot = self._histogram("tpot_seconds", "Time per output token", TPOT_BUCKETS_S, *of_request)
        self.e2e = self._histogram("e2e_seconds", "Whole requests", E2E_BUCKETS_S, *of_request)
        self.part_seconds = self._counter(
            "request_part_seconds", "Where the time of requests that were answered went, added up", *of_request, "part"
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens: cached on the decode engine, prefilled remotely and sent there, or prefilled locally",
            *(*of_request, "source"),
        )
        self.output_tokens = self._counter("output_tokens", "Tokens generated for clients", *of_request)
        self.resumed = self._counter("streams_resumed", "Streams continued on another engine")
        self.retried = self._counter("placements_retried", "Placements after a failed one")
        self.transfers = self._counter("kv_transfers", "KV transfers that arrived")
        self.transferred = self._counter("kv_transferred_bytes", "KV bytes sent between engines")
        self.transfer_failures = self._counter("kv_transfer_failures", "Failed KV transfers, retries included")
        self.transfer_retries = self._counter("kv_transfer_retries", "Transfers tried once more after a failed one")
        transfer_seconds = self._histogram("kv_transfer_seconds", "KV transfers that arrived", TRANSFER_BUCKETS_S)
        self.replications = self._counter(
            "replications", "Copies of hot contexts to engines that the plan names, by how they ended", "outcome"
        )
        self.leaks = self._counter("aborts_failed", "Aborts that an engine did not confirm")
        self.records_lost = self._counter("records_lost", "Request records dropped: the store was away too long")
        self.arrivals_lost = self._counter("arrivals_lost", "Arrivals dropped: the store was away too long")
        self.spans_lost = self._counter("spans_lost", "Spans of traces that the collector did not take")
        self.documents_refused = self._counter("documents_refused", "Plans and SLO tables that were refused", "kind")
        self.plan_version = self._gauge("plan_version", "Plan in force", "livemin")
        self.store_up = self._gauge("store_up", "1 while the store answers", "livemin")
        # Set at each fold rather than read at a scrape: another process may be the one that is scraped.
        self._sums = {
            "inflight_requests": self._gauge("inflight_requests", "Requests being worked on"),
            "waiting_requests": self._gauge(
                "waiting_requests", "Requests that wait, by what is lacking", "livesum", "lack"
            ),
            "inflight_transfers": self._gauge("inflight_transfers", "KV transfers, from reservation to arrival"),
            "client_connections": self._gauge("client_connections", "Open client connections"),
            "records_buffered": self._gauge("records_buffered", "Records not yet in the store"),
        }
        self._transfer_seconds = _Tally(transfer_seconds, TRANSFER_BUCKETS_S)
        self._followed: dict[Gauge, Callable[[], float]] = {}
        self._received: Counted[str] = Counted()
        self._series: dict[tuple[str, str], _Series] = {}
        self._ended: list[tuple[RequestRecord, Slo, bytes | None]] = []
        self._store_is_up: bool | None = None

    def follow(self, name: str, value: Callable[[], float], **labels: str) -> None:
        """Read a gauge from its owner at each fold instead of counting it up and down."""
        gauge = self._sums[name]
        self._followed[gauge.labels(**labels) if labels else gauge] = value

    def store_seen(self, *, up: bool) -> bool:
        """Note whether the store answered; true if that is news."""
        news = up is not self._store_is_up
        self._store_is_up = up
        self.store_up.set(up)
        return news

    def plan_applied(self, plan: Plan) -> None:
        self.plan_version.set(plan.version)

    def refused(self, outcome: Outcome) -> None:
        """Count a request that was not understood well enough to belong to a class."""
        self.requests.labels(DEFAULT_CLASS, NO_PATTERN, outcome.value).inc()

    def arrived(self, slo_class: str) -> None:
        self._received[slo_class] += 1

    def finished(self, record: RequestRecord, slo: Slo, traceparent: bytes | None = None) -> None:
        """Count a request that has ended. `traceparent` as it came with it: traces that are kept become exemplars."""
        self._ended.append((record, slo, traceparent))
        if len(self._ended) >= BATCH:
            self._count_ended()

    def fold(self) -> None:
        """Bring everything counted since the last fold into the registry; call it before a scrape and now and then."""
        for slo_class, count in self._received.items():
            self.received.labels(slo_class).inc(count)
        self._received.clear()
        self._count_ended()
        for series in self._series.values():
            series.fold()
        self._transfer_seconds.fold()
        for gauge, value in self._followed.items():
            gauge.set(value())

    def _count_ended(self) -> None:
        for record, slo, traceparent in self._ended:
            key = record.slo_class, record.pattern
            series = self._series.get(key) or self._new_series(key)
            series.finished(record, slo, trace_id_of(traceparent) if traceparent is not None else None)
            if record.transferred_bytes is not None or record.transfer_failures:
                self._count_transfers(record, traceparent)
        self._ended.clear()

    def _count_transfers(self, record: RequestRecord, traceparent: bytes | None) -> None:
        if record.transfer_failures:
            self.transfer_failures.inc(record.transfer_failures)
            self.transfer_retries.inc(record.transfer_retries)
        if record.transferred_bytes is not None:
            self.transfers.inc()
            self.transferred.inc(record.transferred_bytes)
        if record.transfer_s is not None:
            at_s = record.arrived_at_s + record.e2e_s
            self._transfer_seconds.observe(record.transfer_s, trace_id_of(traceparent), at_s)

    def _new_series(self, key: tuple[str, str]) -> _Series:
        series = self._series[key] = _Series(self, *key)
        return series

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"trimtab_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"trimtab_{name}", text, labels, buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, text: str, mode: Mode = "livesum", *labels: str) -> Gauge:
        return Gauge(f"trimtab_{name}", text, labels, registry=self._registry, multiprocess_mode=mode)
