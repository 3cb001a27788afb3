"""Engines that die. The name puts these last: each death costs a start."""

import asyncio

from tests.support.fleet import until
from tests.support.sglang_questions import QUESTIONS, text_of

SLOW_CHUNK = 128
REQUESTS = 200
CLIENTS = 8
SHARE_THAT_LEAVES = 0.15


async def test_a_receiver_that_dies_fails_the_transfer_and_forgets_its_reservations(pair, sender, receiver, prompts):
    prompt = [prompts.randrange(1000, 40_000) for _ in range(1500)]
    await sender.post("config", chunked_prefill_tokens=SLOW_CHUNK)
    reserved = await receiver.reserve("lost", prompt)
    sending = asyncio.create_task(sender.send("lost", prompt, reserved, len(prompt) - 1))

    await until(lambda: _receives(receiver), "bytes are on their way", 120.0)
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


async def test_mixed_requests_with_random_aborts_and_a_sender_that_dies_half_way(
    fleet, pair, sender, receiver, prompts
):
    """Every client that stays gets the answer a plain engine gives, and the engine that lives loses no slot."""
    await fleet.plan("balanced", offload_ratio=0.2, min_remote_tokens=1, bypass_cached_fraction=1.0)
    names = [f"own {number}" for number in range(7)] + [f"shared {number}" for number in range(7, 10)]
    gate = asyncio.Semaphore(CLIENTS)
    ended = 0

    async def one(number: int) -> None:
        nonlocal ended
        path, body = QUESTIONS[names[number % len(names)]]
        leaves = prompts.random() < SHARE_THAT_LEAVES
        async with gate:
            try:
                async with asyncio.timeout(prompts.random() if leaves else None):
                    answer = await fleet.http.post(path, json=body | {"max_tokens": 6})
            except TimeoutError:
                return
            finally:
                ended += 1
        assert answer.status_code == 200, answer.text
        assert text_of(pair.plain_answers[names[number % len(names)]]).startswith(text_of(answer.json()))

    widowed = asyncio.create_task(_widow(sender, receiver, prompts, lambda: ended >= REQUESTS // 2))
    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    await widowed
    await fleet.settled()
    await receiver.whole()


async def _widow(sender, receiver, prompts, is_time) -> None:
    """Kill the sender while it sends: the receiver's room comes back, and nothing that arrived is visible."""
    await until(is_time, "half of the requests are through", 600.0)
    prompt = [prompts.randrange(1000, 40_000) for _ in range(1500)]
    await sender.post("config", chunked_prefill_tokens=SLOW_CHUNK)
    reserved = await receiver.reserve("widowed", prompt, ttl_s=20)
    sending = asyncio.create_task(sender.send("widowed", prompt, reserved, len(prompt) - 1))
    await until(lambda: _receives(receiver), "bytes are on their way", 120.0)
    sender.engine.kill()
    await asyncio.gather(sending, return_exceptions=True)

    async def is_free() -> bool:
        return (await receiver.load()).kv_reserved_tokens == 0

    await until(is_free, "the room came back", 120.0)
    again = await receiver.reserve("anew", prompt)
    assert again["prefix_matched_length"] == 0
    await receiver.post("abort", request_id="anew")


async def _receives(receiver) -> bool:
    return (await receiver.load()).inbound_transfers > 0
