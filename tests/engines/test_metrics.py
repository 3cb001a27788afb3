from prometheus_client import CollectorRegistry

from engines.metrics import Counters, EngineCollector, Mirror, Reporting
from engines.types import EngineInfo, EngineLoad, KvLayout

INFO = EngineInfo(
    engine_id="e7",
    url="http://127.0.0.1:1",
    kind="laptop",
    model="m",
    context_length_tokens=100,
    kv_capacity_tokens=100,
    kv_layout=KvLayout(model="m", dtype="float16", layers=1, kv_heads=1, head_dim=1),
    transports=("tcp",),
    epoch="0",
)


def samples(registry: CollectorRegistry) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class Exported:
    def __init__(self) -> None:
        self.counters = Counters()
        self.load = EngineLoad()
        self.reporting = Reporting()
        self.registry = CollectorRegistry()
        self.collector = EngineCollector(INFO, self.counters, lambda: self.load, lambda: self.reporting)
        self.registry.register(self.collector)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"trimtab_engine_{name}", {"engine": "e7"} | labels)

    def store_up(self) -> float | None:
        return self.registry.get_sample_value("trimtab_store_up")


def test_busy_time_is_told_apart_by_whether_a_pass_prefilled() -> None:
    exported = Exported()
    exported.counters.passed(0.25, prefill_tokens=100)
    exported.counters.passed(0.5, prefill_tokens=0)
    exported.counters.passed(0.5, prefill_tokens=0)
    assert exported.value("busy_seconds_total", work="prefill") == 0.25
    assert exported.value("busy_seconds_total", work="decode") == 1.0
    assert (exported.value("passes_total"), exported.value("prefill_tokens_total")) == (3, 100)


def test_what_the_engine_does_not_know_is_absent_and_not_a_number() -> None:
    exported = Exported()
    assert exported.value("chunked_prefill_tokens") is None
    assert exported.store_up() is None
    exported.load = EngineLoad(chunked_prefill_tokens=512, kv_used_tokens=3)
    exported.reporting = Reporting(records_lost=4, redis_answers=False)
    assert exported.value("chunked_prefill_tokens") == 512
    assert exported.value("kv_used_tokens") == 3
    assert (exported.store_up(), exported.value("records_lost_total")) == (0, 4)


def test_failed_transfers_are_counted_by_what_went_wrong() -> None:
    exported = Exported()
    assert exported.value("transfers_total", outcome="ok") == 0
    exported.counters.transfers["transfer_failed"] += 2
    assert exported.value("transfers_total", outcome="transfer_failed") == 2


def test_a_mirror_shows_what_the_collector_shows_as_it_grows() -> None:
    exported, mirrored = Exported(), CollectorRegistry()
    mirror = Mirror(exported.collector, mirrored)
    for tokens in (100, 0):
        exported.counters.passed(0.25, tokens)
        exported.counters.transfers["transfer_failed"] += 1
        exported.load = EngineLoad(running=tokens, prefill_decode_interval=2)
        exported.reporting = Reporting(redis_answers=True)
        mirror.update()
        assert samples(mirrored) == samples(exported.registry)
