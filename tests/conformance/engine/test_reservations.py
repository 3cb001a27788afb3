"""prep_recv and abort: what is reserved, for how long, and how it comes back."""

import pytest

CAPACITY_TOKENS = 4096


@pytest.fixture(scope="module")
def small(launch):
    """An engine whose KV room is quickly full."""
    return launch(kv_capacity_tokens=CAPACITY_TOKENS, context_length_tokens=CAPACITY_TOKENS)


async def test_a_negative_end_counts_from_the_back(engine, caller):
    prompt = await caller.tokens(engine, caller.text())
    request_id, reserved = await caller.reserve(engine, prompt, -7)
    held_tokens = (await caller.load(engine))["kv_reserved_tokens"] + reserved["prefix_matched_length"]
    assert held_tokens == len(prompt) - 7
    await caller.post(engine, "abort", request_id=request_id)


@pytest.mark.parametrize("end", ["len", "-len", 0, 10_000_000])
async def test_an_end_outside_the_prompt_is_refused(engine, caller, end):
    prompt = await caller.tokens(engine, caller.text(20))
    end = {"len": len(prompt), "-len": -len(prompt)}.get(end, end)
    answer = await caller.post(engine, "prep_recv", request_id=caller.new_id(), prompt=prompt, end=end, ttl_s=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
    assert (await caller.load(engine))["kv_reserved_tokens"] == 0


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_a_full_engine_answers_429_and_says_when_to_ask_again(small, caller):
    prompt = await caller.tokens(small, caller.text(400))
    assert CAPACITY_TOKENS / 2 < len(prompt) < CAPACITY_TOKENS
    request_id, _ = await caller.reserve(small, prompt, -1)
    refused = await caller.post(small, "prep_recv", request_id="other", prompt=prompt[1:], end=-1, ttl_s=5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_kv_room")
    assert int(refused.headers["retry-after"]) >= 1
    await caller.post(small, "abort", request_id=request_id)
    other, _ = await caller.reserve(small, prompt[1:], -1)
    await caller.post(small, "abort", request_id=other)


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_a_reservation_dies_after_its_ttl_and_its_room_comes_back(small, caller, eventually):
    prompt = await caller.tokens(small, caller.text(400))
    _, reserved = await caller.reserve(small, prompt, -1, ttl_s=0.2)
    assert (await caller.load(small))["kv_reserved_tokens"] == len(prompt) - 1 - reserved["prefix_matched_length"]

    async def is_free() -> bool:
        return (await caller.load(small))["kv_reserved_tokens"] == 0

    await eventually(is_free)
    second, _ = await caller.reserve(small, prompt, -1)
    await caller.post(small, "abort", request_id=second)


async def test_abort_frees_a_reservation_and_may_be_repeated(engine, caller):
    prompt = await caller.tokens(engine, caller.text())
    request_id, _ = await caller.reserve(engine, prompt, -1)
    for _ in range(3):
        answer = await caller.post(engine, "abort", request_id=request_id)
        assert (answer.status_code, answer.json()) == (200, {})
    assert (await caller.load(engine))["kv_reserved_tokens"] == 0


async def test_reserving_twice_under_one_id_holds_the_room_once(engine, caller):
    prompt = await caller.tokens(engine, caller.text())
    request_id, first = await caller.reserve(engine, prompt, -1)
    await caller.reserve(engine, prompt, -1, request_id=request_id)
    held_tokens = (await caller.load(engine))["kv_reserved_tokens"] + first["prefix_matched_length"]
    assert held_tokens == len(prompt) - 1
    await caller.post(engine, "abort", request_id=request_id)


async def test_what_is_cached_is_matched_and_not_reserved_again(engine, caller):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    await caller.generate(engine, caller.new_id(), text)
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    assert reserved["prefix_matched_length"] == len(prompt) - 1
    assert (await caller.load(engine))["kv_reserved_tokens"] == 0
    await caller.post(engine, "abort", request_id=request_id)
