"""Room for KV in a real engine: reserved at once or refused, given back always, and never lost."""

import asyncio

from tests.support.fleet import until
from tests.support.sglang_questions import own_prompt, text_of


def new_prompt(prompts, count: int) -> list[int]:
    return [prompts.randrange(1000, 40_000) for _ in range(count)]


async def test_reservations_side_by_side_hold_their_room_and_give_it_back(receiver, prompts):
    await receiver.whole()
    asked = {f"side-{number}": new_prompt(prompts, 300) for number in range(8)}
    await asyncio.gather(*(receiver.reserve(request_id, prompt) for request_id, prompt in asked.items()))
    load = await receiver.load()
    assert load.kv_reserved_tokens == 8 * 299
    assert load.kv_free_tokens == load.kv_capacity_tokens - 8 * 299
    await asyncio.gather(*(receiver.post("abort", request_id=request_id) for request_id in asked))
    await receiver.whole()


async def test_transfers_side_by_side_all_arrive(sender, receiver, prompts):
    asked = {f"both-{number}": new_prompt(prompts, 120 + number) for number in range(4)}

    async def move(request_id: str, prompt: list[int]) -> int:
        reserved = await receiver.reserve(request_id, prompt)
        sent = await sender.send(request_id, prompt, reserved, len(prompt) - 1)
        assert sent.status_code == 200, sent.text
        body = {"model": receiver.engine.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        answer = await receiver.generate(request_id, body, prompt=prompt, begin=len(prompt) - 1)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached = await asyncio.gather(*(move(request_id, prompt) for request_id, prompt in asked.items()))
    assert cached == [len(prompt) - 1 for prompt in asked.values()]
    await receiver.whole()
    await sender.whole()


async def test_a_reservation_dies_after_its_ttl_and_is_refused_from_then_on(sender, receiver, prompts):
    prompt = new_prompt(prompts, 200)
    reserved = await receiver.reserve("short-lived", prompt, ttl_s=0.5)
    await until(receiver.holds_nothing, "the reservation has died", 60.0)
    late = await sender.send("short-lived", prompt, reserved, len(prompt) - 1)
    assert (late.status_code, late.json()["error"]["code"]) == (410, "reservation_gone")
    await receiver.whole()


async def test_a_full_engine_refuses_at_once_and_takes_what_it_can_evict(receiver, prompts):
    await receiver.whole()
    capacity = (await receiver.info()).kv_capacity_tokens
    body = {"model": receiver.engine.model, "prompt": own_prompt(8), "max_tokens": 1, "temperature": 0}
    await receiver.http.post(f"{receiver.engine.url}/v1/completions", json=body)
    # The cache of that request is all there is besides; it has to make room for the last of these.
    sizes = [6000] * (capacity // 6000) + [capacity % 6000]
    names = [f"fill-{number}" for number in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        await receiver.reserve(name, new_prompt(prompts, size + 1), ttl_s=600)
    assert (await receiver.load()).kv_free_tokens == 0
    refused = await receiver.post("prep_recv", request_id="more", prompt=new_prompt(prompts, 100), end=-1, ttl_s=5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_kv_room")
    assert int(refused.headers["retry-after"]) >= 1
    for name in names:
        await receiver.post("abort", request_id=name)
    answer = await receiver.http.post(f"{receiver.engine.url}/v1/completions", json=body)
    assert answer.status_code == 200
    await receiver.whole()


async def test_aborting_a_transfer_half_way_leaves_no_trace(sender, receiver, prompts):
    prompt = new_prompt(prompts, 1500)
    await sender.post("config", chunked_prefill_tokens=128)
    reserved = await receiver.reserve("broken-off", prompt)
    sending = asyncio.create_task(sender.send("broken-off", prompt, reserved, len(prompt) - 1))

    async def is_under_way() -> bool:
        return (await receiver.load()).inbound_transfers > 0

    await until(is_under_way, "bytes are on their way", 120.0)
    await receiver.post("abort", request_id="broken-off")
    failed = await sending
    assert failed.json()["error"]["code"] in ("reservation_gone", "transfer_failed")
    again = await receiver.reserve("anew", prompt)
    assert again["prefix_matched_length"] == 0
    await receiver.post("abort", request_id="anew")
    await receiver.whole()
    await sender.whole()


async def test_a_caller_that_leaves_frees_both_sides(sender, receiver, prompts):
    prompt = new_prompt(prompts, 1000)
    await sender.post("config", chunked_prefill_tokens=128)
    reserved = await receiver.reserve("left", prompt, ttl_s=5)
    sending = asyncio.create_task(sender.send("left", prompt, reserved, len(prompt) - 1))

    async def is_working() -> bool:
        return (await sender.load()).running > 0

    await until(is_working, "the sender computes", 120.0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await sender.whole()
    await receiver.whole()


async def test_many_calls_in_any_order_lose_no_slot(sender, receiver, prompts):
    asked = [(f"any-{number}", new_prompt(prompts, prompts.randrange(2, 60))) for number in range(24)]

    async def one(request_id: str, prompt: list[int]) -> None:
        reserved = await receiver.reserve(request_id, prompt, ttl_s=prompts.choice([0.3, 20.0]))
        body = {"model": receiver.engine.model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        for step in prompts.sample(["send", "abort", "generate", "send"], k=prompts.randrange(4)):
            if step == "send":
                await sender.send(request_id, prompt, reserved, len(prompt) - 1)
            elif step == "abort":
                await receiver.post("abort", request_id=request_id)
            else:
                answer = await receiver.generate(request_id, body, prompt=prompt)
                assert answer.status_code == 200
                assert text_of(answer.json())
        await receiver.post("abort", request_id=request_id)

    await asyncio.gather(*(one(request_id, prompt) for request_id, prompt in asked))
    await receiver.whole()
    await sender.whole()
