"""What a router exports to Prometheus. The registry is given; label values are bounded by settings and enums."""

from bisect import bisect_left
from collections import Counter as Counted
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engines.records import Outcome, RequestRecord
from tuner.plan import Plan
from tuner.slo import DEFAULT_CLASS, Slo

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60)
TPOT_BUCKETS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300)


class _Tally:
    """A histogram's observations between two folds. Counting here costs a tenth of observing in the library, which
    locks and walks its buckets each time and has no call for many observations at once."""

    def __init__(self, series: Histogram, bounds: Sequence[float]) -> None:
        self._series = series
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def fold(self) -> None:
        """Hand everything to the library and begin anew."""
        for at, count in enumerate(self._counts):
            if count:
                self._series._buckets[at].inc(count)
                self._counts[at] = 0
        self._series._sum.inc(self._sum)
        self._sum = 0.0


class _OfClass:
    """The series of one SLO class, looked up once: finding a labelled child costs more than counting on it."""

    def __init__(self, metrics: "RouterMetrics", slo_class: str) -> None:
        self._by_outcome = {outcome: metrics.requests.labels(slo_class, outcome.value) for outcome in Outcome}
        self._good = metrics.good.labels(slo_class)
        self.outcomes: Counted[Outcome] = Counted()
        self.good = 0
        self.ttft = _Tally(metrics.ttft.labels(slo_class), TTFT_BUCKETS_S)
        self.tpot = _Tally(metrics.tpot.labels(slo_class), TPOT_BUCKETS_S)
        self.e2e = _Tally(metrics.e2e.labels(slo_class), E2E_BUCKETS_S)

    def fold(self) -> None:
        for outcome, count in self.outcomes.items():
            self._by_outcome[outcome].inc(count)
        self.outcomes.clear()
        self._good.inc(self.good)
        self.good = 0
        for tally in (self.ttft, self.tpot, self.e2e):
            tally.fold()


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "trimtab_requests",
            "Finished requests by SLO class and outcome",
            ("slo_class", "outcome"),
            registry=registry,
        )
        self.good = Counter(
            "trimtab_good_requests",
            "Requests that met both their TTFT and TPOT bound",
            ("slo_class",),
            registry=registry,
        )
        self.ttft = Histogram(
            "trimtab_ttft_seconds", "Time to first token", ("slo_class",), buckets=TTFT_BUCKETS_S, registry=registry
        )
        self.tpot = Histogram(
            "trimtab_tpot_seconds", "Time per output token", ("slo_class",), buckets=TPOT_BUCKETS_S, registry=registry
        )
        self.e2e = Histogram(
            "trimtab_e2e_seconds", "Whole requests", ("slo_class",), buckets=E2E_BUCKETS_S, registry=registry
        )
        self.resumed = Counter("trimtab_streams_resumed", "Streams continued on another engine", registry=registry)
        self.retried = Counter("trimtab_placements_retried", "Placements after a failed one", registry=registry)
        self.transferred = Counter("trimtab_kv_transferred_bytes", "KV bytes sent between engines", registry=registry)
        self.transfer_failures = Counter("trimtab_kv_transfer_failures", "Failed KV transfers", registry=registry)
        self.leaks = Counter("trimtab_aborts_failed", "Aborts that an engine did not confirm", registry=registry)
        self.records_lost = Counter(
            "trimtab_records_lost", "Request records dropped because the store was away too long", registry=registry
        )
        self.documents_refused = Counter(
            "trimtab_documents_refused", "Plans and SLO tables that were refused", ("kind",), registry=registry
        )
        self.plan_version = Gauge(
            "trimtab_plan_version", "Plan in force", registry=registry, multiprocess_mode="livemin"
        )
        self.store_up = Gauge(
            "trimtab_store_up", "1 while the store answers", registry=registry, multiprocess_mode="livemin"
        )
        # Set at each fold rather than read at a scrape: another process may be the one that is scraped.
        self._sums = {
            name: Gauge(f"trimtab_{name}", help_, registry=registry, multiprocess_mode="livesum")
            for name, help_ in (
                ("inflight_requests", "Requests being worked on"),
                ("waiting_requests", "Requests waiting for room"),
                ("client_connections", "Open client connections"),
                ("engines_available", "Engines that answer and do not drain"),
                ("records_buffered", "Request records not yet in the store"),
            )
        }
        self._followed: dict[Gauge, Callable[[], float]] = {}
        self._classes: dict[str, _OfClass] = {}
        self._store_is_up: bool | None = None

    def follow(self, name: str, value: Callable[[], float]) -> None:
        """Read a gauge from its owner at each fold instead of counting it up and down."""
        self._followed[self._sums[name]] = value

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
        self.requests.labels(DEFAULT_CLASS, outcome.value).inc()

    def finished(self, record: RequestRecord, slo: Slo) -> None:
        series = self._classes.get(record.slo_class) or self._new_class(record.slo_class)
        series.outcomes[record.outcome] += 1
        if record.transfer_failures:
            self.transfer_failures.inc(record.transfer_failures)
        if record.transferred_bytes:
            self.transferred.inc(record.transferred_bytes)
        if record.outcome is not Outcome.OK:
            return
        if slo.met(record.ttft_s, record.tpot_s):
            series.good += 1
        series.e2e.observe(record.e2e_s)
        if record.ttft_s is not None:
            series.ttft.observe(record.ttft_s)
        if record.tpot_s is not None:
            series.tpot.observe(record.tpot_s)

    def fold(self) -> None:
        """Bring everything counted since the last fold into the registry; call it before a scrape and now and then."""
        for series in self._classes.values():
            series.fold()
        for gauge, value in self._followed.items():
            gauge.set(value())

    def _new_class(self, slo_class: str) -> _OfClass:
        series = self._classes[slo_class] = _OfClass(self, slo_class)
        return series
