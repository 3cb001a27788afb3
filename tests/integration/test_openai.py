"""What OpenAI clients expect, through a router over engines, for every pattern."""

import asyncio
import json

import openai
import pytest

from engines.records import Outcome
from tests.support.fleet import MODEL, text_of, until

ROLES = {"e0": "prefill", "e1": "decode"}
PATTERNS = {
    "data_parallel": {},
    "disaggregated": {},
    "balanced": {"offload_ratio": 0.3},
}


@pytest.fixture(params=PATTERNS)
async def fleet(request, start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan(request.param, ROLES, **PATTERNS[request.param])
    return fleet


@pytest.fixture
async def client(fleet):
    async with openai.AsyncOpenAI(base_url=f"{fleet.running.url}/v1", api_key="x", max_retries=0) as client:
        yield client


MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Tell me about foxes. " * 40}]


async def test_chat_streams_what_it_answers_plain_with_right_usage(fleet, client):
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20}
    plain = await client.chat.completions.create(**asked)
    pieces, usage = [], None
    async for chunk in await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == plain.choices[0].message.content
    assert usage.completion_tokens == plain.usage.completion_tokens <= 20
    assert usage.prompt_tokens == plain.usage.prompt_tokens > 100
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    plain_record, stream_record = await fleet.records(2)
    assert (plain_record.stream, stream_record.stream) == (False, True)
    assert stream_record.output_tokens == usage.completion_tokens
    assert stream_record.prompt_tokens == usage.prompt_tokens
    await fleet.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_over_several_tokens_ends_the_text_before_it(client, stream):
    whole = await client.completions.create(model=MODEL, prompt=text_of(200), max_tokens=30)
    words = whole.choices[0].text.split()
    stop = f"{words[4]} {words[5]} {words[6]}"
    asked = {"model": MODEL, "prompt": text_of(200), "max_tokens": 30, "stop": [stop]}
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        reason = [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1]
    else:
        answer = await client.completions.create(**asked)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert text == whole.choices[0].text.partition(stop)[0]
    assert reason == "stop"


async def test_several_choices_and_logprobs_come_through(fleet, client):
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, n=3, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
    (record,) = await fleet.records(1)
    assert record.output_tokens == answer.usage.completion_tokens


async def test_a_single_token_has_no_tpot_and_still_counts_as_good(fleet, client):
    async for _ in await client.completions.create(model=MODEL, prompt="one", max_tokens=1, stream=True):
        pass
    (record,) = await fleet.records(1)
    assert (record.outcome, record.output_tokens, record.tpot_s) == (Outcome.OK, 1, None)
    good = f'trimtab_good_requests_total{{pattern="{record.pattern}",slo_class="default"}} 1.0'
    assert good in (await fleet.http.get("/metrics")).text


async def test_token_ids_and_text_give_the_same_answer(fleet, client):
    tokens = await next(iter(fleet.desk.fleet)).client.tokenize(_question(text_of(200)))
    by_text = await client.completions.create(model=MODEL, prompt=text_of(200), max_tokens=10)
    by_ids = await client.completions.create(model=MODEL, prompt=list(tokens.tokens), max_tokens=10)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage.prompt_tokens == len(tokens.tokens) == by_text.usage.prompt_tokens


async def test_several_prompts_in_one_request_are_each_answered(client):
    answer = await client.completions.create(model=MODEL, prompt=["a fox", "a dog"], max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1]


REFUSED = {
    "empty prompt": ({"prompt": ""}, openai.BadRequestError, None),
    "no prompt": ({}, openai.BadRequestError, "missing_required_parameter"),
    "over-long prompt": ({"prompt": "word " * 20_000}, openai.BadRequestError, "context_length_exceeded"),
    "2 MB prompt": ({"prompt": "abcdefghi " * 200_000}, openai.BadRequestError, "context_length_exceeded"),
    "prompt and answer too long": (
        {"prompt": "word", "max_tokens": 10**6},
        openai.BadRequestError,
        "context_length_exceeded",
    ),
    "unknown model": ({"model": "gpt-9", "prompt": "x"}, openai.NotFoundError, "model_not_found"),
    "wrong type": ({"prompt": "x", "stream": "yes"}, openai.BadRequestError, "invalid_type"),
    "wrong type the engine finds": ({"prompt": "x", "temperature": "hot"}, openai.BadRequestError, None),
}


@pytest.mark.parametrize(("asked", "expected", "code"), REFUSED.values(), ids=REFUSED.keys())
async def test_bad_requests_get_the_error_an_openai_client_understands(fleet, client, asked, expected, code):
    with pytest.raises(expected) as refused:
        await client.post("/completions", body={"model": MODEL} | asked, cast_to=object)
    assert refused.value.body["message"]
    if code is not None:
        assert refused.value.code == code
    await fleet.settled()


async def test_malformed_json_and_an_oversized_body_are_told_apart(start_fleet):
    fleet = await start_fleet(1, router={"limits": {"body_bytes": 1_000_000}})
    broken = await fleet.http.post("/v1/completions", content=b'{"model": ')
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    large = await fleet.http.post("/v1/completions", content=b"x" * 1_000_001)
    assert large.status_code == 413
    assert large.json()["error"]["message"]


def _question(prompt: str):
    from engines.protocol import Tokenize

    return Tokenize(prompt=prompt)


async def test_the_public_side_wants_its_key(start_fleet):
    fleet = await start_fleet(1, router={"api_key": "secret"})
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        refused = await fleet.http.get("/v1/models", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = await fleet.http.get("/v1/models", headers={"authorization": "Bearer secret"})
    assert answer.json()["data"][0]["id"] == MODEL
    assert (await fleet.http.get("/health")).status_code == 200


async def test_a_plan_applies_to_the_next_request_and_running_ones_keep_theirs(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("data_parallel")
    body = {"model": MODEL, "prompt": text_of(100), "max_tokens": 60, "stream": True, "ignore_eos": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.aiter_lines()
        await anext(lines)
        await fleet.plan("disaggregated", ROLES)
        uncached = {"model": MODEL, "prompt": text_of(100, "never seen"), "max_tokens": 2}
        answer = await fleet.http.post("/v1/completions", json=uncached)
        assert answer.status_code == 200
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    by_version = {record.plan_version: record for record in await fleet.records(2)}
    assert (by_version[1].pattern, by_version[1].output_tokens) == ("data_parallel", 60)
    assert (by_version[2].pattern, by_version[2].prefill_engine) == ("disaggregated", "e0")


async def test_a_disaggregated_request_moves_all_but_the_last_token(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("disaggregated", ROLES)
    await fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": text_of(300), "max_tokens": 3})
    (record,) = await fleet.records(1)
    assert (record.prefill_engine, record.decode_engine) == ("e0", "e1")
    assert (record.split_begin, record.split_end) == (0, record.prompt_tokens - 1)
    assert record.cached_tokens == record.prompt_tokens - 1
    assert record.transferred_bytes == 23_040 * record.split_end
    assert record.transfer_s > 0
    assert record.prefill_s > 0


async def test_what_d_already_holds_is_not_sent_again(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("disaggregated", ROLES, bypass_cached_fraction=1.0)
    for tail in ("first question", "second question"):
        body = {"model": MODEL, "prompt": text_of(400) + tail, "max_tokens": 3}
        await fleet.http.post("/v1/completions", json=body)
    first, second = await fleet.records(2)
    assert second.split_begin > 0.9 * first.split_end
    assert second.transferred_bytes == 23_040 * (second.split_end - second.split_begin)


async def _in_pieces():
    yield b"x"


async def test_only_the_api_takes_bodies_and_nothing_of_any_other_is_kept(start_fleet):
    fleet = await start_fleet(1)
    for path in ("/metrics", "/health", "/nonsense"):
        for content in (b"x" * 10, _in_pieces()):
            refused = await fleet.http.post(path, content=content)
            assert refused.status_code == 400, path
    assert (await fleet.http.get("/health")).status_code == 200


async def test_slo_classes_come_from_the_header(start_fleet):
    from tuner.slo import Slo, SloTable

    fleet = await start_fleet(1)
    bounds = Slo(ttft_ms=1000, tpot_ms=100)
    table = SloTable(version=1, classes={"default": bounds, "chat": bounds})
    await fleet.store.compare_and_set(fleet.keys.slo, table.model_dump_json().encode(), None)
    await until(lambda: fleet.running.service._board.slos.version == 1, "the table is applied")
    for name in ("chat", "unheard of"):
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        await fleet.http.post("/v1/completions", json=body, headers={"x-slo-class": name})
    assert [record.slo_class for record in await fleet.records(2)] == ["chat", "default"]


async def test_draining_a_router_finishes_its_streams_and_takes_no_new_ones(start_fleet):
    fleet = await start_fleet(1)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "stream": True, "ignore_eos": True}
    async with fleet.http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.aiter_lines()
        await anext(lines)
        draining = asyncio.create_task(fleet.running.drain(30))
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", int(fleet.running.url.rsplit(":", 1)[1]))
        events = [line async for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert sum(bool(json.loads(line[6:])["choices"]) for line in events[:-1]) >= 39
    await draining
    assert fleet.running.service.inflight == 0


async def test_a_store_that_goes_away_stops_nothing_and_gets_its_records_later(start_engine, tmp_path):
    from controller.stack.embedded import embedded_redis
    from tests.support.fleet import open_fleet

    engine = await start_engine("e0")
    async with embedded_redis() as redis, open_fleet({"e0": engine}, redis.url, {}) as fleet:
        await fleet.plan("data_parallel", policy="round_robin")
        await redis.kill()
        for _ in range(3):
            answer = await fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 2})
            assert answer.status_code == 200
        await until(lambda: fleet.running.service._metrics._store_is_up is False, "the loss is noticed")
        assert "trimtab_store_up 0.0" in (await fleet.http.get("/metrics")).text
        await redis.start()
        records = await fleet.records(3)
        assert {record.plan_version for record in records} == {1}


async def test_a_client_that_hangs_up_at_the_end_of_its_stream_has_not_left_early(start_fleet):
    fleet = await start_fleet(1, engine={"time_scale": 0.1})
    await fleet.plan("data_parallel")
    raw = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 3, "stream": True}).encode()
    port = int(fleet.running.url.rsplit(":", 1)[1])
    for _ in range(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
        await reader.readuntil(b"[DONE]\n\n")
        writer.transport.abort()
    assert {record.outcome for record in await fleet.records(40)} == {Outcome.OK}
    await fleet.settled()
