"""What routers and engines export while things happen to them, read at their `/metrics`."""

import asyncio
from collections.abc import Mapping

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fleet import MODEL, Fleet, until
from tests.support.fleet import text_of as text
from tuner.slo import Slo, SloTable

SPLIT_ROLES = {"e0": "prefill", "e1": "decode"}
Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def read(page: str) -> Samples:
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all series that have these labels."""
    return sum(
        value
        for (found, its_labels), value in samples.items()
        if found == f"trimtab_{name}" and labels.items() <= its_labels
    )


async def of_router(fleet: Fleet) -> Samples:
    return read((await fleet.http.get("/metrics")).text)


async def of_engine(fleet: Fleet, engine_id: str) -> Samples:
    async with httpx.AsyncClient() as http:
        return read((await http.get(f"{fleet.engines[engine_id].url}/metrics")).text)


async def ask(fleet: Fleet, prompt: str, **given: object) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True} | given
    (await fleet.http.post("/v1/completions", json=body)).raise_for_status()


async def promise(fleet: Fleet, slo: Slo) -> None:
    table = SloTable(version=1, classes={"default": slo})
    await fleet.store.compare_and_set(fleet.keys.slo, table.model_dump_json().encode(), None)
    await until(lambda: fleet.running.service._board.slos.version == 1, "the SLOs are applied")


async def most_waiting(fleet: Fleet, asking: list["asyncio.Task[None]"]) -> Mapping[str, float]:
    """The most requests that waited at a time, by what was lacking."""
    most = {"admission": 0.0, "kv_room": 0.0, "transfer_slot": 0.0}
    while not all(task.done() for task in asking):
        samples = await of_router(fleet)
        await asyncio.sleep(0.02)
        most = {lack: max(seen, total(samples, "waiting_requests", lack=lack)) for lack, seen in most.items()}
    await asyncio.gather(*asking)
    return most


@pytest.mark.parametrize(
    ("pattern", "roles", "knobs", "engine", "lack"),
    [
        ("disaggregated", SPLIT_ROLES, {"max_inflight_transfers": 1}, {}, "transfer_slot"),
        ("disaggregated", SPLIT_ROLES, {}, {"kv_capacity_tokens": 1500}, "kv_room"),
        ("data_parallel", {}, {"admission": "queue", "max_running_per_engine": 1}, {}, "admission"),
    ],
    ids=["transfer_slot", "kv_room", "admission"],
)
async def test_requests_that_wait_are_counted_by_what_they_lack(start_fleet, pattern, roles, knobs, engine, lack):
    fleet = await start_fleet(2, engine=engine)
    await fleet.plan(pattern, roles, **knobs)
    asking = [asyncio.create_task(ask(fleet, text(1000, f"n{at}"))) for at in range(6)]
    most = await most_waiting(fleet, asking)
    assert most.pop(lack) >= 1
    assert set(most.values()) == {0}
    assert total(await of_router(fleet), "waiting_requests") == 0


@pytest.mark.parametrize(("faults", "arrived"), [(0, 1), (1, 1), (2, 0)])
async def test_failed_transfers_and_their_retries_are_counted_on_both_sides(start_fleet, meddler, faults, arrived):
    meddling, flags = meddler
    fleet = await start_fleet(2, per_engine={"e1": flags})
    await fleet.plan("disaggregated", SPLIT_ROLES)
    meddling.corrupt = faults
    await ask(fleet, text(500))
    await fleet.records(1)
    router, receiver = await of_router(fleet), await of_engine(fleet, "e1")
    counted = [total(router, f"kv_transfer{name}_total") for name in ("s", "_failures", "_retries")]
    assert counted == [arrived, faults, min(faults, 1)]
    assert total(router, "kv_transfer_seconds_count") == arrived
    assert (total(router, "kv_transferred_bytes_total") > 0) == bool(arrived)
    assert total(receiver, "engine_transfers_total", outcome="ok") == arrived
    assert total(receiver, "engine_transfers_total", outcome="transfer_failed") == faults
    assert (total(router, "prompt_tokens_total", source="remote") > 0) == bool(arrived)


async def test_late_first_tokens_are_put_down_to_prefill_or_to_the_queue_before_it(start_fleet):
    fleet = await start_fleet(2)
    await promise(fleet, Slo(ttft_ms=1, tpot_ms=60_000))
    await fleet.plan("disaggregated", SPLIT_ROLES)
    await ask(fleet, text(2000, "alone"), stream=True)
    await fleet.records(1)
    alone = await of_router(fleet)
    assert total(alone, "slo_violations_total", bound="ttft", cause="prefill", pattern="disaggregated") == 1
    await asyncio.gather(*(ask(fleet, text(2000, f"n{at}"), stream=True) for at in range(12)))
    await fleet.records(13)
    together = await of_router(fleet)
    assert total(together, "slo_violations_total", bound="ttft") == 13
    assert total(together, "slo_violations_total", bound="ttft", cause="queue") >= 1
    assert total(together, "slo_violations_total", bound="tpot") == 0
    assert total(together, "good_requests_total") == 0


async def test_engines_say_how_long_they_were_busy_prefilling_and_decoding(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("disaggregated", SPLIT_ROLES)
    await ask(fleet, text(2000), max_tokens=30)
    prefill, decode = await of_engine(fleet, "e0"), await of_engine(fleet, "e1")
    busy = {
        engine: [
            total(samples, "engine_busy_seconds_total", engine=engine, work=work) for work in ("prefill", "decode")
        ]
        for engine, samples in (("e0", prefill), ("e1", decode))
    }
    assert busy["e0"][0] > busy["e1"][0]
    assert busy["e0"][1] == 0
    assert busy["e1"][1] > 0
    assert total(await of_router(fleet), "engine_role", engine="e0", role="prefill") == 1
