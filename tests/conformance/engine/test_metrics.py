"""/metrics: dashboards and alerts need not know which kind of engine they look at."""

from prometheus_client.parser import text_string_to_metric_families

from engines.metrics import Counters, EngineCollector
from engines.types import EngineInfo, EngineLoad, KvLayout

LAYOUT = KvLayout(model="m", dtype="bfloat16", layers=1, kv_heads=1, head_dim=1)
INFO = EngineInfo(
    engine_id="any",
    url="http://127.0.0.1:1",
    kind="any",
    model="m",
    context_length_tokens=1,
    kv_capacity_tokens=1,
    kv_layout=LAYOUT,
    transports=(),
    epoch="0",
)
PREFIXES = ("trimtab_engine_", "trimtab_store_")


async def scrape(engine, caller):
    text = (await caller.http.get(f"{engine.url}/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text) if family.name.startswith(PREFIXES)}


async def test_every_kind_of_engine_exports_the_same_families(engine, caller):
    expected = {family.name: family for family in EngineCollector(INFO, Counters(), EngineLoad).collect()}
    found = await scrape(engine, caller)
    assert {name: family.type for name, family in found.items()} == {
        name: family.type for name, family in expected.items()
    }


async def test_samples_name_their_engine_and_count_what_it_did(engine, caller):
    info = (await caller.http.get(f"{engine.url}/microserving/info")).json()
    before = await scrape(engine, caller)
    text = caller.text(20)
    await caller.generate(engine, caller.new_id(), text, max_tokens=4, ignore_eos=True)
    after = await scrape(engine, caller)
    samples = [sample for name, family in after.items() if name != "trimtab_store_up" for sample in family.samples]
    assert {sample.labels["engine"] for sample in samples} == {info["engine_id"]}

    def grown(name: str, **labels: str) -> float:
        def total(scraped) -> float:
            return sum(s.value for s in scraped[name].samples if labels.items() <= s.labels.items())

        return total(after) - total(before)

    assert grown("trimtab_engine_prefill_tokens") >= len(await caller.tokens(engine, text)) - 1
    assert grown("trimtab_engine_output_tokens") >= 4
    assert grown("trimtab_engine_passes") >= 4
    assert grown("trimtab_engine_busy_seconds", work="prefill") > 0
    assert grown("trimtab_engine_busy_seconds", work="decode") > 0
