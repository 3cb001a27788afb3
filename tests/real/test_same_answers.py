"""Whatever way a request takes through the engines, its greedy answer is the one a plain SGLang engine gives."""

import asyncio

import pytest

from engines.tokenizer import Tokenizer
from tests.support.fleet import until
from tests.support.sglang import BYTES_PER_TOKEN, ask, model_folder
from tests.support.sglang_questions import (
    ENDPOINTS,
    QUESTIONS,
    chat,
    city_of,
    comparable,
    own_prompt,
    shared_prompt,
    text_of,
)

ROLES = {"e0": "prefill", "e1": "decode"}
NO_BYPASS = {"min_remote_tokens": 1, "bypass_cached_fraction": 1.0}


@pytest.mark.parametrize("name", sorted(ENDPOINTS))
def test_sglangs_own_endpoints_answer_as_without_the_plugin(pair, name):
    asked = ask(pair.engines[0].url, ENDPOINTS[name])
    assert comparable(asked) == comparable(pair.plain_answers[name])


@pytest.mark.parametrize("name", ["chat", "chat stream", "chat json", "completion", "completion stop"])
async def test_start_generate_answers_as_the_engines_own_endpoint_does(pair, receiver, name):
    _, body = QUESTIONS[name]
    body = body | {"stream": False} if "stream" in body else body
    body.pop("stream_options", None)
    answer = await receiver.generate(f"own-{name.replace(' ', '-')}", body)
    assert text_of(answer.json()) == text_of(pair.plain_answers[name])


async def run(fleet, pair, name: str):
    """Send a question through the router; its record, once its text is what the plain engine said."""
    path, body = QUESTIONS[name]
    answer = await fleet.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json()) == text_of(pair.plain_answers[name])
    return await record_of(fleet, answer)


async def record_of(fleet, answer):
    async def written():
        records = await fleet.records(1)
        return next((one for one in records if one.request_id == answer.headers["x-request-id"]), None)

    return await until(written, "the request's record")


async def test_data_parallel(fleet, pair, redis_url):
    await fleet.plan("data_parallel")
    record = await run(fleet, pair, "own 0")
    assert (record.pattern, record.prefill_engine, record.transferred_bytes) == ("data_parallel", None, None)
    await fleet.settled()


async def test_disaggregated_computes_the_kv_on_one_engine_and_generates_on_the_other(fleet, pair):
    await fleet.plan("disaggregated", ROLES, **NO_BYPASS)
    record = await run(fleet, pair, "own 1")
    assert (record.prefill_engine, record.decode_engine) == ("e0", "e1")
    assert record.cached_tokens == record.split_end == record.prompt_tokens - 1
    assert record.transferred_bytes == BYTES_PER_TOKEN * (record.split_end - record.split_begin)
    await fleet.settled()


@pytest.mark.parametrize(("number", "ratio"), [(2, 0.1), (3, 0.5), (4, 0.9)])
async def test_balanced(fleet, pair, number, ratio):
    await fleet.plan("balanced", ROLES, offload_ratio=ratio, **NO_BYPASS)
    record = await run(fleet, pair, f"own {number}")
    assert (record.prefill_engine, record.decode_engine) == ("e0", "e1")
    assert record.cached_tokens == record.split_end < record.prompt_tokens - 1
    assert record.transferred_bytes == BYTES_PER_TOKEN * (record.split_end - record.split_begin)
    await fleet.settled()


async def test_only_what_the_receiver_lacks_travels_when_prompts_share_a_prefix(fleet, pair):
    await fleet.plan("disaggregated", ROLES, **NO_BYPASS)
    first = await run(fleet, pair, "shared 7")
    second = await run(fleet, pair, "shared 8")
    assert first.split_begin < second.split_begin
    assert second.transferred_bytes == BYTES_PER_TOKEN * (second.split_end - second.split_begin)
    await fleet.plan("balanced", ROLES, offload_ratio=0.05, **NO_BYPASS)
    third = await run(fleet, pair, "shared 9")
    assert 0 < third.split_begin < third.split_end < third.prompt_tokens - 1
    await fleet.settled()


@pytest.mark.parametrize("end", [1, 17, 64, -1])
async def test_split_points_given_to_the_verbs(pair, sender, receiver, end):
    number = {1: 5, 17: 6, 64: 5, -1: 6}[end]
    _, body = QUESTIONS[f"own {number}"]
    await receiver.whole()
    prompt = await receiver.tokens(own_prompt(number))
    end = end % len(prompt)
    request_id = f"split-{number}-{end}"
    reserved = await receiver.reserve(request_id, prompt, end)
    assert (await sender.send(request_id, prompt, reserved, end)).json()["bytes"] == BYTES_PER_TOKEN * end
    answer = (await receiver.generate(request_id, body, prompt=prompt, begin=end)).json()
    assert text_of(answer) == text_of(pair.plain_answers[f"own {number}"])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == end


async def test_migrated_context_serves_an_ordinary_request(sender, receiver):
    await receiver.whole()
    body = {"model": receiver.engine.model, "prompt": shared_prompt(0), "max_tokens": 4, "temperature": 0}
    prompt = await receiver.tokens(shared_prompt(0))
    reserved = await receiver.reserve("moved", prompt)
    assert (await sender.send("moved", prompt, reserved, len(prompt) - 1)).status_code == 200
    await receiver.post("abort", request_id="moved")
    answer = (await receiver.http.post(f"{receiver.engine.url}/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


async def test_json_schema_and_logprobs_come_through_the_router_on_split_requests(fleet, pair, sender, receiver):
    await fleet.plan("disaggregated", ROLES, **NO_BYPASS)
    path, body = ENDPOINTS["chat json"]
    answer = await fleet.http.post(path, json=body)
    assert city_of(answer.json()) == city_of(pair.plain_answers["chat json"])
    assert (await record_of(fleet, answer)).prefill_engine == "e0"
    await asyncio.gather(sender.whole(), receiver.whole())
    path, body = ENDPOINTS["chat logprobs"]
    answer = await fleet.http.post(path, json=body)
    found = answer.json()["choices"][0]["logprobs"]
    expected = pair.plain_answers["chat logprobs"]["choices"][0]["logprobs"]
    assert comparable(found) == comparable(expected)
    assert (await record_of(fleet, answer)).prefill_engine == "e0"
    await fleet.settled()


async def test_the_routers_tokens_of_a_chat_are_the_engines(fleet, receiver):
    await fleet.plan("disaggregated", ROLES, **NO_BYPASS)
    messages = [
        {"role": "system", "content": "Be brief.  Very brief!\n"},
        {"role": "user", "content": "Naïve café – 你好, 12345? <|im_end|>"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": " And now? "},
    ]
    engines = (await receiver.http.post(f"{receiver.engine.url}/tokenize", json={"messages": messages})).json()
    assert Tokenizer.load(model_folder()).encode_chat(messages) == engines["tokens"]
    answer = await fleet.http.post("/v1/chat/completions", json=chat(messages=messages, max_tokens=2))
    assert answer.status_code == 200
    record = (await fleet.records(1))[0]
    assert record.cached_tokens == record.prompt_tokens - 1
