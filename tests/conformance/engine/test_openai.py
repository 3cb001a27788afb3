"""The OpenAI endpoints of an engine, as OpenAI's own client and its users expect them."""

import openai
import pytest

MESSAGES = [{"role": "user", "content": "tell me something"}]


@pytest.fixture
async def client(engine):
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models_lists_the_one_served(engine, client):
    assert [model.id async for model in client.models.list()] == [engine.model]


async def test_a_chat_streams(engine, client):
    stream = await client.chat.completions.create(model=engine.model, messages=MESSAGES, max_tokens=8, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert all(chunk.usage is None for chunk in chunks)


async def test_a_stream_ends_with_usage_if_asked_for(engine, client):
    options = {"include_usage": True}
    stream = await client.completions.create(
        model=engine.model,
        prompt="hi",
        max_tokens=5,
        stream=True,
        stream_options=options,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.completion_tokens, chunks[-1].usage.total_tokens) == (5, 6)


async def test_one_token_is_enough(engine, client):
    answer = await client.chat.completions.create(model=engine.model, messages=MESSAGES, max_completion_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_without_a_limit_an_answer_ends(engine, client):
    answer = await client.chat.completions.create(model=engine.model, messages=MESSAGES)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_without_a_limit_an_endless_answer_ends_at_the_engines_default(engine, client):
    answer = await client.completions.create(model=engine.model, prompt="hi", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_several_prompts_give_choices_in_order(engine, client):
    alone = [
        (await client.completions.create(model=engine.model, prompt=prompt, max_tokens=6)).choices[0].text
        for prompt in ("red", "blue sky")
    ]
    both = await client.completions.create(model=engine.model, prompt=["red", "blue sky"], max_tokens=6, n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [both.choices[0].text, both.choices[2].text] == alone


async def test_token_ids_are_a_prompt_like_their_text(engine, client, caller):
    text = caller.text(5)
    ids = await caller.tokens(engine, text)
    answers = [
        await client.completions.create(model=engine.model, prompt=given, max_tokens=6, temperature=0)
        for given in (text, ids)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[1].usage.prompt_tokens == len(ids)


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_echo_puts_the_prompt_before_the_answer(engine, client):
    plain = await client.completions.create(model=engine.model, prompt="Say it", max_tokens=4)
    echoed = await client.completions.create(model=engine.model, prompt="Say it", max_tokens=4, echo=True)
    assert echoed.choices[0].text == "Say it" + plain.choices[0].text
    stream = await client.completions.create(model=engine.model, prompt="Say it", max_tokens=4, echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == echoed.choices[0].text


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
async def test_a_stop_string_across_tokens_never_leaks(engine, client, streamed, as_list):
    asked = {"model": engine.model, "prompt": "count", "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    whole = (await client.completions.create(**asked)).choices[0].text
    words = whole.split(" ")
    stop = f"{words[9][1:]} {words[10]} {words[11][:1]}"
    stops = ["never comes", stop] if as_list else stop
    if streamed:
        stream = await client.completions.create(**asked, stop=stops, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        text, finish = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        choice = (await client.completions.create(**asked, stop=stops)).choices[0]
        text, finish = choice.text, choice.finish_reason
    assert text == whole.partition(stop)[0]
    assert finish == "stop"


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_text_that_only_looked_like_a_stop_comes_in_the_end(engine, client):
    asked = {"model": engine.model, "prompt": "count", "max_tokens": 10, "extra_body": {"ignore_eos": True}}
    whole = (await client.completions.create(**asked)).choices[0].text
    answer = await client.completions.create(**asked, stop=whole[-4:] + "zzz")
    assert answer.choices[0].text == whole
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_completion_logprobs_are_well_formed(engine, client):
    answer = await client.completions.create(
        model=engine.model, prompt="hi", max_tokens=4, logprobs=3, extra_body={"ignore_eos": True}
    )
    choice = answer.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [3] * 4
    offsets = choice.logprobs.text_offset
    assert [choice.text[at:].startswith(token) for at, token in zip(offsets, choice.logprobs.tokens, strict=True)] == [
        True
    ] * 4


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
async def test_chat_logprobs_are_well_formed_and_the_same_in_a_stream(engine, client):
    asked = {
        "model": engine.model,
        "messages": MESSAGES,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    plain = (await client.chat.completions.create(**asked)).choices[0]
    assert "".join(entry.token for entry in plain.logprobs.content) == plain.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in plain.logprobs.content)
    stream = await client.chat.completions.create(**asked, stream=True)
    entries = [entry async for chunk in stream for entry in chunk.choices[0].logprobs.content]
    assert entries == plain.logprobs.content


async def test_cached_tokens_are_reported(engine, client, caller):
    text = caller.text()
    first = await client.completions.create(model=engine.model, prompt=text, max_tokens=1)
    second = await client.completions.create(model=engine.model, prompt=text, max_tokens=1)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"prompt": ""}, 400, "bad_request", "prompt"),
        ({"prompt": []}, 400, "bad_request", "prompt"),
        ({"prompt": ["a", ""]}, 400, "bad_request", "prompt"),
        ({"prompt": ["a", 5]}, 400, "bad_request", "prompt"),
        ({"prompt": [10**9]}, 400, "bad_request", "prompt"),
        ({"prompt": [-1]}, 400, "bad_request", "prompt"),
        ({"prompt": None}, 400, "bad_request", "prompt"),
        ({"prompt": "a", "max_tokens": "many"}, 400, "bad_request", "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "bad_request", "max_tokens"),
        ({"prompt": "a", "max_tokens": -5}, 400, "bad_request", "max_tokens"),
        ({"prompt": "a", "n": 0}, 400, "bad_request", "n"),
        ({"prompt": "a", "n": 10**6}, 400, "bad_request", "n"),
        ({"prompt": "a", "stop": ""}, 400, "bad_request", "stop"),
        ({"prompt": "a", "stop": ["x"] * 100}, 400, "bad_request", "stop"),
        ({"prompt": "a", "temperature": 3}, 400, "bad_request", "temperature"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "bad_request", "stream_options"),
        ({"prompt": "a", "model": "gpt-99"}, 404, "model_not_found", "model"),
        ({"prompt": "a", "max_tokens": 100_000}, 400, "context_length_exceeded", None),
        ({"prompt": "word " * 10_000}, 400, "context_length_exceeded", None),
    ],
)
async def test_a_bad_completion_is_refused_by_field(engine, caller, body, status, code, param):
    answer = await caller.http.post(f"{engine.url}/v1/completions", json={"model": engine.model, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
@pytest.mark.parametrize(
    "messages",
    [None, [], "hello", [{}], [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}]],
)
async def test_bad_messages_are_refused(engine, caller, messages):
    answer = await caller.http.post(
        f"{engine.url}/v1/chat/completions", json={"model": engine.model, "messages": messages}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_text_parts_are_text(engine, client):
    parts = [{"role": "user", "content": [{"type": "text", "text": "tell me something"}]}]
    answers = [
        await client.chat.completions.create(model=engine.model, messages=given, max_tokens=5, temperature=0)
        for given in (MESSAGES, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


async def test_tokenize_counts_a_chat_as_the_engine_does(engine, client, caller):
    tokens = (await caller.http.post(f"{engine.url}/tokenize", json={"messages": MESSAGES})).json()
    answer = await client.chat.completions.create(model=engine.model, messages=MESSAGES, max_tokens=1)
    assert tokens["count"] == len(tokens["tokens"]) == answer.usage.prompt_tokens


@pytest.mark.emulated("SGLang's own endpoints answer as SGLang does")
@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"messages": 5}, {"messages": []}])
async def test_tokenize_wants_one_thing(engine, caller, body):
    answer = await caller.http.post(f"{engine.url}/tokenize", json=body)
    assert answer.status_code == 400, answer.text
