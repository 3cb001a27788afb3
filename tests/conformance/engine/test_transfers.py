"""remote_send: KV arrives whole where it was reserved, or not at all."""

import asyncio

import pytest

PAYLOAD_AT = 5000
"""A position well inside the payload, behind all headers, of a transfer of the prompts used here."""


async def test_a_full_transfer_leaves_one_token_to_compute(engine, sender, caller):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    sent = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert sent.status_code == 200, sent.text
    answer = await caller.generate(engine, request_id, text, call={"prompt": prompt})
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert (await caller.load(engine))["kv_reserved_tokens"] == 0


async def test_the_answer_counts_modelled_bytes_and_what_the_sender_had_cached(engine, sender, caller):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    layout = (await caller.http.get(f"{engine.url}/microserving/info")).json()["kv_layout"]
    bytes_per_token = 2 * layout["layers"] * layout["kv_heads"] * layout["head_dim"] * 2
    await caller.generate(sender, caller.new_id(), text)
    request_id, reserved = await caller.reserve(engine, prompt, 100)
    sent = (await caller.send(sender, request_id, prompt, reserved, 100)).json()
    assert sent["bytes"] == (100 - reserved["prefix_matched_length"]) * bytes_per_token
    assert sent["cached_length"] == 99
    assert sent["prefill_s"] >= sent["queue_s"] >= 0
    assert sent["transfer_s"] > 0
    await caller.post(engine, "abort", request_id=request_id)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
async def test_every_split_gives_the_text_that_one_engine_gives(engine, sender, caller, share):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    alone = (await caller.generate(sender, caller.new_id(), text)).json()
    end = min(len(prompt) - 1, -int(-(1 - share) * len(prompt) // 1))
    request_id, reserved = await caller.reserve(engine, prompt, end)
    assert (await caller.send(sender, request_id, prompt, reserved, end)).status_code == 200
    split = (await caller.generate(engine, request_id, text, call={"prompt": prompt, "begin": end})).json()
    assert split["choices"] == alone["choices"]
    assert split["usage"]["prompt_tokens_details"]["cached_tokens"] == end


async def test_a_transfer_without_a_generation_moves_context(engine, sender, caller, eventually):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    await caller.post(engine, "abort", request_id=request_id)
    answer = await caller.generate(engine, caller.new_id(), text)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


async def test_a_reservation_of_another_request_is_refused(engine, sender, caller):
    prompt = await caller.tokens(engine, caller.text())
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    refused = await caller.send(sender, "somebody-else", prompt, reserved, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "reservation_gone")
    await caller.post(engine, "abort", request_id=request_id)


async def test_an_aborted_reservation_is_refused(engine, sender, caller):
    prompt = await caller.tokens(engine, caller.text())
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    await caller.post(engine, "abort", request_id=request_id)
    refused = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "reservation_gone")


async def test_a_replaced_reservation_is_refused(engine, sender, caller):
    prompt = await caller.tokens(engine, caller.text())
    request_id, first = await caller.reserve(engine, prompt, -1)
    await caller.reserve(engine, prompt, -1, request_id=request_id)
    refused = await caller.send(sender, request_id, prompt, first, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "reservation_gone")
    await caller.post(engine, "abort", request_id=request_id)


async def test_an_expired_reservation_is_refused(engine, sender, caller, eventually):
    prompt = await caller.tokens(engine, caller.text())
    request_id, reserved = await caller.reserve(engine, prompt, -1, ttl_s=0.05)

    async def has_expired() -> bool:
        return (await caller.load(engine))["kv_reserved_tokens"] == 0

    await eventually(has_expired)
    refused = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "reservation_gone")


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_a_reservation_of_an_earlier_life_of_the_engine_is_refused(launch, sender, caller, free_port):
    ports = {"port": free_port(), "kv_port": free_port()}
    first = launch(**ports)
    prompt = await caller.tokens(first, caller.text())
    request_id, reserved = await caller.reserve(first, prompt, -1)
    assert first.stop() == 0
    second = launch(**ports)
    await caller.reserve(second, prompt, -1, request_id=request_id)
    refused = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "reservation_gone")


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_engines_with_other_layouts_exchange_nothing(launch, sender, caller):
    other = launch(model="another-model")
    prompt = await caller.tokens(other, caller.text())
    request_id, reserved = await caller.reserve(other, prompt, -1)
    refused = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "kv_layout_mismatch")
    assert await caller.metric(other, "trimtab_engine_transfers_total") == 0


@pytest.mark.parametrize(("later", "shorter"), [(1, 0), (0, 1), (-9, 0), (0, -9)])
async def test_a_range_that_was_not_reserved_is_refused(engine, sender, caller, later, shorter):
    prompt = await caller.tokens(engine, caller.text())
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    begin, end = reserved["prefix_matched_length"] + later, len(prompt) - 1 - shorter
    refused = await caller.send(sender, request_id, prompt, {**reserved, "prefix_matched_length": begin}, end)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request")
    await caller.post(engine, "abort", request_id=request_id)


async def test_other_tokens_than_the_reserved_ones_do_not_get_in(engine, sender, caller):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    forged = [*prompt[:50], prompt[50] ^ 1, *prompt[51:]]
    refused = await caller.send(sender, request_id, forged, reserved, len(prompt) - 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "transfer_failed")
    await caller.post(engine, "abort", request_id=request_id)


@pytest.mark.emulated("needs an engine with flags of its own")
@pytest.mark.parametrize("harm", ["corrupt_at", "cut_at"])
async def test_a_harmed_transfer_is_never_visible_and_can_be_repeated(launch, proxy, sender, caller, harm):
    receiver = launch(kv_port=proxy.target_port, kv_advertise=proxy.address)
    text = caller.text()
    prompt = await caller.tokens(receiver, text)
    request_id, reserved = await caller.reserve(receiver, prompt, -1)
    setattr(proxy, harm, PAYLOAD_AT)
    failed = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "transfer_failed")
    other_id, seen = await caller.reserve(receiver, prompt, -1)
    assert seen["prefix_matched_length"] == reserved["prefix_matched_length"]
    await caller.post(receiver, "abort", request_id=other_id)
    setattr(proxy, harm, None)
    assert (await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)).status_code == 200
    answer = await caller.generate(receiver, request_id, text, call={"prompt": prompt})
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_a_receiver_that_is_gone_fails_the_transfer_and_not_the_sender(launch, sender, caller):
    receiver = launch()
    text = caller.text()
    prompt = await caller.tokens(receiver, text)
    request_id, reserved = await caller.reserve(receiver, prompt, -1)
    receiver.process.kill()
    receiver.process.wait()
    failed = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "transfer_failed")
    assert (await caller.generate(sender, caller.new_id(), text)).status_code == 200
    assert (await caller.load(sender))["kv_used_tokens"] == 0


async def test_a_lost_transfer_costs_time_and_never_an_answer(engine, caller):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    request_id, _ = await caller.reserve(engine, prompt, -1)
    answer = await caller.generate(engine, request_id, text, call={"prompt": prompt, "begin": len(prompt) - 1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == len(await caller.tokens(engine, _text(answer)))
    assert (await caller.load(engine))["kv_reserved_tokens"] == 0


def _text(answer) -> str:
    return answer.json()["choices"][0]["text"]


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_a_caller_that_leaves_frees_the_sender(launch, engine, caller, eventually):
    slow = launch(time_scale=20)
    prompt = await caller.tokens(engine, caller.text(100))
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await caller.send(slow, request_id, prompt, reserved, len(prompt) - 1)
    await eventually(lambda: caller.is_idle(slow))
    await caller.post(engine, "abort", request_id=request_id)
