"""Engines that die. The name puts these last: each death costs a start."""

import asyncio
import random

from tests.support.fleet import until
from tests.support.sglang import MODEL
from tests.support.sglang_questions import QUESTIONS, text_of

SLOW_CHUNK = 128


async def test_a_sender_that_dies_frees_the_receiver_within_the_ttl(pair, sender, receiver, prompts):
    prompt = [prompts.randrange(1000, 40_000) for _ in range(1500)]
    await sender.post("config", chunked_prefill_tokens=SLOW_CHUNK)
    reserved = await receiver.reserve("widowed", prompt, ttl_s=15)
    sending = asyncio.create_task(sender.send("widowed", prompt, reserved, len(prompt) - 1))

    async def is_under_way() -> bool:
        return (await receiver.load()).inbound_transfers > 0

    await until(is_under_way, "bytes are on their way", 120.0)
    sender.engine.kill()
    await asyncio.gather(sending, return_exceptions=True)
    await until(receiver.holds_nothing, "the room came back", 120.0)
    # What arrived was never all of it, so none of it counts.
    again = await receiver.reserve("anew", prompt)
    assert again["prefix_matched_length"] == 0
    await receiver.post("abort", request_id="anew")
    await receiver.whole()
    _, body = QUESTIONS["own 0"]
    answer = await receiver.generate("alone", body)
    assert text_of(answer.json()) == text_of(pair.plain_answers["own 0"])


async def test_a_receiver_that_dies_fails_the_transfer_and_forgets_its_reservations(pair, sender, receiver, prompts):
    prompt = [prompts.randrange(1000, 40_000) for _ in range(1500)]
    await sender.post("config", chunked_prefill_tokens=SLOW_CHUNK)
    reserved = await receiver.reserve("lost", prompt)
    sending = asyncio.create_task(sender.send("lost", prompt, reserved, len(prompt) - 1))

    async def is_under_way() -> bool:
        return (await receiver.load()).inbound_transfers > 0

    await until(is_under_way, "bytes are on their way", 120.0)
    receiver.engine.kill()
    failed = await sending
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "transfer_failed")
    await sender.whole()
    _, body = QUESTIONS["own 1"]
    assert text_of((await sender.generate("goes-on", body)).json()) == text_of(pair.plain_answers["own 1"])
    pair.revive()
    stale = await sender.send("lost", prompt, reserved, len(prompt) - 1)
    assert (stale.status_code, stale.json()["error"]["code"]) == (410, "reservation_gone")
    # A sender finds the new life of a receiver it knew before.
    short = prompt[:100]
    fresh = await receiver.reserve("again", short)
    assert (await sender.send("again", short, fresh, 99)).status_code == 200
    await receiver.post("abort", request_id="again")
    await receiver.whole()
    await sender.post("config", chunked_prefill_tokens=4096)


async def test_mixed_requests_with_random_aborts_and_a_death_half_way(fleet, pair, sender, receiver):
    """Every client that stays gets the answer a plain engine gives, and the engine that lives lost no slot."""
    rng = random.Random(7)
    await fleet.plan("balanced", {}, offload_ratio=0.2, min_remote_tokens=1, bypass_cached_fraction=1.0)
    names = [f"own {number}" for number in range(7)] + [f"shared {number}" for number in range(7, 10)]
    gate = asyncio.Semaphore(8)
    ended = 0

    async def one(number: int) -> None:
        nonlocal ended
        name = names[number % len(names)]
        path, body = QUESTIONS[name]
        async with gate:
            asking = fleet.http.post(path, json=body | {"max_tokens": 6, "user": str(number)})
            if rng.random() < 0.15:
                task = asyncio.create_task(asking)
                await asyncio.sleep(rng.random())
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                answer = await asking
                assert answer.status_code == 200, answer.text
                assert text_of(pair.plain_answers[name]).startswith(text_of(answer.json()))
            ended += 1
            if ended == REQUESTS // 2:
                receiver.engine.kill()

    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    await fleet.settled()
    await sender.whole()
    assert (await sender.info()).model == MODEL


REQUESTS = 200
