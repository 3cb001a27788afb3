import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import RouterMetrics
from engines.records import Outcome, RequestRecord
from tuner.slo import BOOTSTRAP_SLOS, DEFAULT_CLASS


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
    slo = BOOTSTRAP_SLOS.classes[DEFAULT_CLASS]
    for outcome in Outcome:
        metrics.finished(record(outcome, transfer_failures=2, transferred_bytes=10), slo)
    assert registry.get_sample_value("trimtab_kv_transfer_failures_total") == 2 * len(Outcome)
    assert registry.get_sample_value("trimtab_kv_transferred_bytes_total") == 10 * len(Outcome)


def test_a_followed_gauge_has_its_owners_value_after_each_fold(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    waiting = 3
    metrics.follow("waiting_requests", lambda: waiting)
    metrics.fold()
    assert registry.get_sample_value("trimtab_waiting_requests") == 3
    waiting = 0
    metrics.fold()
    assert registry.get_sample_value("trimtab_waiting_requests") == 0


def test_whether_the_store_answers_is_news_only_when_it_changes(
    registry: CollectorRegistry, metrics: RouterMetrics
) -> None:
    assert [metrics.store_seen(up=up) for up in (True, True, False, False, True)] == [True, False, True, False, True]
    assert registry.get_sample_value("trimtab_store_up") == 1
