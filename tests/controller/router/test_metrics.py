import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from controller.metrics import RouterMetrics
from engines.metrics import expose
from engines.records import Outcome, RequestRecord
from tuner.slo import BOOTSTRAP_SLOS, DEFAULT_CLASS

SLO = BOOTSTRAP_SLOS.classes[DEFAULT_CLASS]
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
LABELS = {"slo_class": DEFAULT_CLASS, "pattern": "balanced"}
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> RouterMetrics:
    return RouterMetrics(registry)


def record(outcome: Outcome, **more: object) -> RequestRecord:
    given: dict[str, object] = {
        "request_id": "r1",
        "router_id": "router",
        "slo_class": DEFAULT_CLASS,
        "arrived_at_s": 0.0,
        "status": 200,
        "api": "chat",
        "stream": True,
        "pattern": "balanced",
        "plan_version": 1,
        "e2e_s": 1.0,
    }
    return RequestRecord(outcome=outcome, **(given | more))  # type: ignore[arg-type]


def test_transfers_and_their_failures_count_however_the_request_ended(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    for outcome in Outcome:
        metrics.finished(record(outcome, transfer_failures=2, transferred_bytes=10), SLO)
    metrics.fold()
    assert registry.get_sample_value("trimtab_kv_transfer_failures_total") == 2 * len(Outcome)
    assert registry.get_sample_value("trimtab_kv_transferred_bytes_total") == 10 * len(Outcome)


def test_a_followed_gauge_has_its_owners_value_after_each_fold(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    waiting = 3
    metrics.follow("waiting_requests", lambda: waiting, lack="kv_room")
    metrics.fold()
    assert registry.get_sample_value("trimtab_waiting_requests", {"lack": "kv_room"}) == 3
    waiting = 0
    metrics.fold()
    assert registry.get_sample_value("trimtab_waiting_requests", {"lack": "kv_room"}) == 0


def test_whether_the_store_answers_is_news_only_when_it_changes(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    assert [metrics.store_seen(up=up) for up in (True, True, False, False, True)] == [True, False, True, False, True]
    assert registry.get_sample_value("trimtab_store_up") == 1


def test_a_miss_is_counted_by_bound_and_cause_and_a_good_request_by_neither(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    metrics.finished(record(Outcome.OK, ttft_s=0.1, tpot_s=0.01), SLO)
    metrics.finished(record(Outcome.OK, ttft_s=9.0, queue_s=6.0, prefill_s=3.0, tpot_s=0.01), SLO)
    metrics.finished(record(Outcome.OK, ttft_s=0.1, tpot_s=0.5), SLO)
    metrics.finished(record(Outcome.FAILED, status=502), SLO)
    metrics.fold()
    counted = {
        (bound, cause): registry.get_sample_value(
            "trimtab_slo_violations_total", LABELS | {"bound": bound, "cause": cause}
        )
        for bound, cause in (("ttft", "queue"), ("ttft", "prefill"), ("ttft", "error"), ("tpot", "decode"))
    }
    assert counted == {
        ("ttft", "queue"): 1,
        ("ttft", "prefill"): 0,
        ("ttft", "error"): 1,
        ("tpot", "decode"): 1,
    }
    assert registry.get_sample_value("trimtab_good_requests_total", LABELS) == 1


def test_prompt_tokens_are_told_apart_by_where_their_kv_came_from(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    split = {"split_begin": 100, "split_end": 700, "transferred_bytes": 1, "output_tokens": 5}
    metrics.finished(record(Outcome.OK, prompt_tokens=1000, cached_tokens=700, **split), SLO)
    metrics.fold()
    by_source = {
        source: registry.get_sample_value("trimtab_prompt_tokens_total", LABELS | {"source": source})
        for source in ("cached", "remote", "local")
    }
    assert by_source == {"cached": 100, "remote": 600, "local": 300}
    assert registry.get_sample_value("trimtab_output_tokens_total", LABELS) == 5


def test_what_an_engine_tells_that_cannot_be_breaks_no_counter(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    absurd = {"queue_s": -5.0, "prefill_s": -1.0, "prompt_tokens": 5, "cached_tokens": -7, "output_tokens": -3}
    metrics.finished(record(Outcome.OK, ttft_s=0.1, **absurd), SLO)
    for answered in (1, 2):
        metrics.fold()
        assert registry.get_sample_value("trimtab_requests_total", LABELS | {"outcome": "ok"}) == answered
        metrics.finished(record(Outcome.OK, ttft_s=0.1), SLO)


@pytest.mark.parametrize(("flags", "expected"), [("01", {TRACE_ID}), ("00", set())])
def test_a_trace_that_is_kept_is_an_exemplar_of_its_bucket(
    registry: CollectorRegistry, metrics: RouterMetrics, flags: str, expected: set[str]
) -> None:
    parent = f"00-{TRACE_ID}-00f067aa0ba902b7-{flags}".encode()
    metrics.finished(record(Outcome.OK, ttft_s=0.25), SLO, parent)
    metrics.fold()
    content, content_type = expose(registry, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    samples = [each for family in text_string_to_metric_families(content.decode()) for each in family.samples]
    exemplars = {each.labels["le"]: each.exemplar for each in samples if each.name == "trimtab_ttft_seconds_bucket"}
    found = exemplars["0.3"]
    assert ({found.labels["trace_id"]} if found else set()) == expected
    assert not any(exemplar for le, exemplar in exemplars.items() if le != "0.3")


@pytest.mark.parametrize("parent", [b"", b"00-zz-1-01", b'00-"}-01', b"\xff" * 55])
def test_a_traceparent_that_is_none_makes_no_exemplar_and_does_no_harm(
    registry: CollectorRegistry, metrics: RouterMetrics, parent: bytes
) -> None:
    metrics.finished(record(Outcome.OK, ttft_s=0.25), SLO, parent)
    metrics.fold()
    assert b"trace_id" not in expose(registry, OPENMETRICS)[0]


def test_whoever_does_not_ask_for_openmetrics_gets_plain_text(registry: CollectorRegistry) -> None:
    for accept in (None, "", "*/*", "text/plain;version=0.0.4"):
        assert expose(registry, accept)[1].startswith("text/plain")
