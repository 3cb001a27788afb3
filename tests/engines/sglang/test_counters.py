"""Metrics under the emulated engine's names, whichever registry serves them."""

import pytest
from prometheus_client import CollectorRegistry

from engines.sglang.counters import Counters, EngineCollector, SharedMetrics
from engines.sglang.messages import Totals
from engines.types import EngineLoad


@pytest.fixture
def counters():
    found = Counters(lambda: 2)
    found.token_mismatches = 3
    found.load = EngineLoad(running=4, kv_capacity_tokens=100)
    found.totals = Totals(passes=7, transfers={"ok": 5, "transfer_failed": 1})
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_both_registries_tell_the_same(counters, shared):
    registry = CollectorRegistry()
    if shared:
        metrics = SharedMetrics(counters, registry)
        metrics.update()
        metrics.update()
    else:
        registry.register(EngineCollector(counters))
    told = {
        "trimtab_engine_running": 4,
        "trimtab_engine_kv_capacity_tokens": 100,
        "trimtab_engine_passes_total": 7,
        "trimtab_engine_token_mismatch_total": 3,
        "trimtab_engine_dropped_records_total": 2,
    }
    assert {name: registry.get_sample_value(name) for name in told} == told
    assert registry.get_sample_value("trimtab_engine_transfers_total", {"outcome": "ok"}) == 5


def test_totals_that_grew_are_told_as_they_are_now(counters):
    registry = CollectorRegistry()
    metrics = SharedMetrics(counters, registry)
    metrics.update()
    counters.totals = Totals(passes=9)
    metrics.update()
    assert registry.get_sample_value("trimtab_engine_passes_total") == 9
