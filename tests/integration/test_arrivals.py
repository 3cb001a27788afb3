"""Demand is in the store when it arrives, and the tuner's window makes one request of its arrival and its end."""

import asyncio
import time

import msgspec

from engines.records import ArrivalBatch
from tests.support.fleet import MODEL, Fleet, text_of, until
from tuner.observe import Window

ANSWER_TOKENS = 120


async def ask(fleet: Fleet, prompt: str) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    (await fleet.http.post("/v1/completions", json=body)).raise_for_status()


async def arrivals(fleet: Fleet) -> list[ArrivalBatch]:
    entries = await fleet.store.latest(fleet.keys.arrivals, 100)
    return [msgspec.json.decode(entry.value, type=ArrivalBatch) for entry in entries]


async def test_a_request_is_demand_before_it_has_ended_and_the_same_request_after(start_fleet):
    fleet = await start_fleet(1)
    window = Window()
    began_s = time.time()
    asking = asyncio.create_task(ask(fleet, text_of(400)))
    batches = await until(lambda: arrivals(fleet), "the arrival is in the store")
    assert not asking.done()
    window.add_arrivals(batches, time.time())
    await asking
    (record,) = await fleet.records(1)
    window.add_requests([record], time.time())
    ((request_id,), (arrived_at_s,)) = batches[0].request_ids, batches[0].arrived_at_s
    assert request_id == record.request_id
    assert began_s - 1 < arrived_at_s < time.time()
    assert abs(arrived_at_s - record.arrived_at_s) < 0.1
    assert batches[0].prefix_hashes == (record.prefix_hashes,)
    demand = window.workload(time.time(), 600)
    assert demand.prompt_tokens.tolist() == [record.prompt_tokens]
    assert demand.output_tokens.tolist() == [ANSWER_TOKENS]
