"""What a controller exports to Prometheus. Counts are kept here; what the tuner sees and says is read at each scrape.

Families of the tuner have samples only while this controller leads: what another one decides is not known here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.decisions import DecisionRecord
from tuner.types import Mode, Prediction, Reason, SearchResult

SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60)

Sample = tuple[dict[str, str], float]
"""Labels and value."""


@dataclass(frozen=True, slots=True)
class ModelQuality:
    """How well one latency of one kind of engine is known."""

    engine_kind: str
    latency: str
    error_ratio: float | None
    """Median relative error of predictions; `None` before any could be checked."""
    samples: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What observing amounts to so far, by stream."""

    read: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By stream and why."""
    newest_s: Mapping[str, float] = field(default_factory=dict)
    """Unix time at which the newest record was made."""
    engines: Mapping[str, int] = field(default_factory=dict)
    """Live engines by kind."""
    models: Iterable[ModelQuality] = ()


class ControllerMetrics:
    """Constructed with nothing but a registry; `follow` connects it to what it reads at a scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.store_errors = self._counter("controller_store_errors", "Store calls that failed")
        self.store_up = Gauge("trimtab_store_up", "1 while the store answers", registry=registry)
        self.decisions = self._counter("tuner_decisions", "Ticks by the reason of their decision", "reason")
        self.tick_failures = self._counter("tuner_tick_failures", "Ticks that raised or ran out of time")
        self.trials = self._counter("tuner_trials", "Candidates that the search has simulated")
        self.drifts = self._counter("tuner_drifts", "Times traffic was seen to have moved, by feature", "feature")
        self.tick_seconds = self._histogram("tuner_tick_seconds", "A whole tick")
        self.search_seconds = self._histogram("tuner_search_seconds", "The search of a tick")
        for reason in Reason:
            self.decisions.labels(reason.value)
        self._tuner = _TunerCollector()
        registry.register(self._tuner)

    def follow(self, leads: Callable[[], bool], leaderships: Callable[[], int], seen: Callable[[], Seen]) -> None:
        """Ask these at each scrape; `leaderships` is how often this controller became the leader."""
        self._tuner.leads, self._tuner.leaderships, self._tuner.seen = leads, leaderships, seen

    def store_answers(self, up: bool) -> None:
        self.store_up.set(up)
        if not up:
            self.store_errors.inc()

    def in_force(self, plan_version: int, mode: Mode) -> None:
        """What the store holds."""
        self._tuner.plan_version, self._tuner.mode = plan_version, mode

    def ticked(self, record: DecisionRecord) -> None:
        """A tick of the leader came to its end."""
        self.decisions.labels(record.reason.value).inc()
        self.tick_seconds.observe(record.tick_s)
        if record.search is not None:
            self.search_seconds.observe(record.search.seconds)
            self.trials.inc(record.search.trials)
        if record.reason is Reason.DRIFT:
            for feature in record.drifted:
                self.drifts.labels(feature).inc()
        self._tuner.ticked(record)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"trimtab_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"trimtab_{name}", text, buckets=SECONDS_BUCKETS, registry=self._registry)


class _TunerCollector(Collector):
    """All families at each scrape; those without a sample are there too, so that they can be listed."""

    def __init__(self) -> None:
        self.leads: Callable[[], bool] = lambda: False
        self.leaderships: Callable[[], int] = int
        self.seen: Callable[[], Seen] = Seen
        self.plan_version: int | None = None
        self.mode: Mode | None = None
        self._last: DecisionRecord | None = None
        self._search: SearchResult | None = None
        self._promise: Prediction | None = None
        self._published_s: float | None = None
        self._decided_s: dict[Reason, float] = {}

    def ticked(self, record: DecisionRecord) -> None:
        self._last = record
        self._search = record.search or self._search
        self._decided_s[record.reason] = record.at_s
        if record.published_version is not None:
            self._published_s, self._promise = record.at_s, record.promise
        elif self.plan_version != record.plan_version:
            self._promise = None

    def collect(self) -> Iterator[Metric]:
        leads = self.leads()
        yield _gauge("controller_leader", "1 while this controller holds the lease", ({}, float(leads)))
        leaderships = float(self.leaderships())
        yield _counter("controller_leaderships", "Times this controller became leader", ({}, leaderships))
        yield _gauge("stored_plan_version", "Version of the plan in the store", *_one(self.plan_version))
        yield from self._of_records(self.seen())
        yield from self._of_decisions(self._last if leads else None)
        yield from self._of_search(self._search if leads else None, self._last if leads else None)

    def _of_decisions(self, last: DecisionRecord | None) -> Iterator[Metric]:
        modes = [({"mode": each.value}, float(each is self.mode)) for each in Mode if self.mode is not None]
        yield _gauge("tuner_mode", "1 for the mode in force, 0 for the others", *modes)
        reasons = [({"reason": each.value}, float(each is last.reason)) for each in Reason] if last else []
        yield _gauge("tuner_reason", "1 for the reason of the last tick, 0 for the others", *reasons)
        yield _gauge(
            "tuner_last_decision_timestamp_seconds",
            "When a tick last decided with this reason",
            *(({"reason": reason.value}, at_s) for reason, at_s in self._decided_s.items() if last),
        )
        yield _gauge(
            "tuner_last_tick_timestamp_seconds", "When the last tick ended", *_one(last.at_s if last else None)
        )
        yield _gauge(
            "tuner_last_plan_timestamp_seconds",
            "When the tuner last published a plan",
            *_one(self._published_s if last else None),
        )
        yield _gauge(
            "tuner_promised_goodput_requests_per_second",
            "What was predicted for the plan in force when it was issued",
            *_one(self._promise.goodput_rps if last and self._promise else None),
        )
        yield from _measured(last)

    def _of_search(self, search: SearchResult | None, last: DecisionRecord | None) -> Iterator[Metric]:
        named = _named(search)
        yield _gauge(
            "tuner_predicted_goodput_requests_per_second",
            "Goodput that the twin expects, corrected by the measured error of past predictions",
            *(({"of": name}, each.goodput_rps) for name, each in named.items()),
        )
        yield _gauge(
            "tuner_predicted_gain_stderr_requests_per_second",
            "Standard error of the predicted gain over the plan in force",
            *(({"of": name}, each.gain_se) for name, each in named.items()),
        )
        yield _gauge(
            "tuner_prediction_error_ratio",
            "(measured - predicted) / predicted goodput of the plan in force",
            *_one(_error(last)),
        )
        best = _best_by_pattern(search)
        for name, text, value in (
            ("goodput_requests_per_second", "Predicted goodput of the best candidate of each pattern", _goodput),
            ("shortfall_ratio", "Share of requests by which it misses attainment targets", _shortfall),
            ("offload_ratio", "Its offload ratio", _offload_ratio),
        ):
            yield _gauge(
                f"tuner_candidate_{name}",
                text,
                *(({"pattern": pattern}, value(each)) for pattern, each in best.items()),
            )

    def _of_records(self, seen: Seen) -> Iterator[Metric]:
        models = list(seen.models)
        yield _gauge(
            "tuner_model_error_ratio",
            "Median relative error of the fitted latency model",
            *((_of_model(each), each.error_ratio) for each in models if each.error_ratio is not None),
        )
        yield _gauge(
            "tuner_model_samples", "Samples behind it", *((_of_model(each), float(each.samples)) for each in models)
        )
        yield _counter(
            "tuner_records_read", "Records read", *(({"stream": name}, float(n)) for name, n in seen.read.items())
        )
        yield _counter(
            "tuner_records_refused",
            "Records not used",
            *(({"stream": stream, "why": why}, float(count)) for (stream, why), count in seen.refused.items()),
        )
        yield _gauge(
            "tuner_last_record_timestamp_seconds",
            "When the newest record was made",
            *(({"stream": name}, at_s) for name, at_s in seen.newest_s.items()),
        )
        yield _gauge(
            "tuner_engines",
            "Live engines the tuner plans with",
            *(({"engine_kind": kind}, float(count)) for kind, count in seen.engines.items()),
        )


def _measured(last: DecisionRecord | None) -> Iterator[Metric]:
    measured = last.measured if last else None
    yield _gauge(
        "tuner_measured_offered_requests_per_second",
        "Arrivals in the interval that the last tick judged by",
        *_one(measured.offered_rps if measured else None),
    )
    yield _gauge(
        "tuner_measured_goodput_requests_per_second",
        "Goodput that clients got in that interval",
        *_one(measured.goodput_rps if measured else None),
    )
    yield _gauge(
        "tuner_measured_attainment_ratio",
        "Share that met both bounds in that interval",
        *(({"slo_class": name}, share) for name, share in (measured.attainment.items() if measured else ())),
    )


def _named(search: SearchResult | None) -> dict[str, Prediction]:
    if search is None:
        return {}
    best = {"best": search.ranked[0]} if search.ranked else {}
    return {"incumbent": search.incumbent, "best_static": search.best_static} | best


def _best_by_pattern(search: SearchResult | None) -> dict[str, Prediction]:
    best: dict[str, Prediction] = {}
    for each in search.ranked if search else ():
        best.setdefault(each.candidate.pattern, each)
    return best


def _error(last: DecisionRecord | None) -> float | None:
    """Of a tick that both measured and predicted; rates may differ, so shares of what was offered are compared."""
    if last is None or last.measured is None or last.search is None:
        return None
    incumbent = last.search.incumbent
    if last.measured.offered_rps <= 0 or incumbent.offered_rps <= 0 or incumbent.goodput_rps <= 0:
        return None
    predicted = incumbent.goodput_rps / incumbent.offered_rps
    return last.measured.goodput_rps / last.measured.offered_rps / predicted - 1


def _goodput(prediction: Prediction) -> float:
    return prediction.goodput_rps


def _shortfall(prediction: Prediction) -> float:
    return prediction.shortfall


def _offload_ratio(prediction: Prediction) -> float:
    return prediction.candidate.knobs.offload_ratio


def _of_model(quality: ModelQuality) -> dict[str, str]:
    return {"engine_kind": quality.engine_kind, "latency": quality.latency}


def _one(value: float | None) -> list[Sample]:
    return [] if value is None else [({}, float(value))]


def _gauge(name: str, text: str, *samples: Sample) -> Metric:
    metric = GaugeMetricFamily(f"trimtab_{name}", text)
    for labels, value in samples:
        metric.add_sample(metric.name, labels, value)
    return metric


def _counter(name: str, text: str, *samples: Sample) -> Metric:
    metric = CounterMetricFamily(f"trimtab_{name}", text)
    for labels, value in samples:
        metric.add_sample(f"{metric.name}_total", labels, value)
    return metric
