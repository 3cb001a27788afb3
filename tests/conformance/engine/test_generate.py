"""start_generate: always an answer, one event a token, nothing lost and nothing twice when a stream moves here."""

import asyncio
import json

import pytest

MESSAGES = [{"role": "user", "content": "tell me something"}]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
"""Answered with one sentence."""


def events_of(stream: str) -> list[dict]:
    found = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def pieces_of(events: list[dict], index: int = 0) -> list[str]:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    pieces = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    # Events that bring no text: see `is_exact`.
    return [piece for piece in pieces if piece]


def finish_reasons_of(events: list[dict]) -> list[str | None]:
    """Of the first choice, event by event; the last event is usage."""
    return [event["choices"][0]["finish_reason"] for event in events[:-1]]


def is_exact(engine) -> bool:
    """Whether each event of a stream is one token. SGLang joins tokens that wait to be sent, and its chats begin with
    an event that only names the role, and end with one that only says why."""
    return engine.kind != "sglang"


def comparable(engine, pieces: list[str]) -> list[str]:
    return pieces if is_exact(engine) else ["".join(pieces)]


def timings_of(stream: str) -> dict:
    comments = [part for part in stream.split("\n\n") if part.startswith(": trimtab ")]
    assert len(comments) == 1
    return json.loads(comments[0].removeprefix(": trimtab "))


async def stream(caller, engine, api: str, resume: list[dict] | None = None, **body) -> str:
    prompt = {"prompt": "Once upon a time"} if api == "completions" else {"messages": MESSAGES}
    asked = {"model": engine.model, "stream": True, "stream_options": {"include_usage": True}, **prompt, **body}
    asked.setdefault("temperature", 0)
    call = {"request_id": "fixed", "api": api, "body": asked} | ({"resume": resume} if resume is not None else {})
    answer = await caller.post(engine, "start_generate", **call)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_one_token_is_one_event_and_usage_counts_them(engine, caller, api):
    events = events_of(await stream(caller, engine, api, max_tokens=20, ignore_eos=True))
    assert len(pieces_of(events)) == 20 or (not is_exact(engine) and 1 < len(pieces_of(events)) < 20)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 20
    others = len(events) - 2
    assert others == 19 or not is_exact(engine)
    assert finish_reasons_of(events) == [None] * others + ["length"]


async def test_chunk_ids_are_made_from_the_request_id(engine, caller):
    assert {event["id"] for event in events_of(await stream(caller, engine, "completions", max_tokens=2))} == {
        "cmpl-fixed"
    }
    assert {event["id"] for event in events_of(await stream(caller, engine, "chat", max_tokens=2))} == {
        "chatcmpl-fixed"
    }


async def test_the_role_comes_first_and_only_there(engine, caller):
    events = events_of(await stream(caller, engine, "chat", max_tokens=5, ignore_eos=True))
    roles = [event["choices"][0]["delta"].get("role") for event in events[:-1]]
    assert roles == ["assistant"] + [None] * (4 if is_exact(engine) else len(roles) - 1)


async def test_timings_stand_just_before_the_end_of_a_stream(engine, caller):
    text = await stream(caller, engine, "completions", max_tokens=4, ignore_eos=True)
    assert text.split("\n\n")[-3].startswith(": trimtab ")
    timings = timings_of(text)
    prompt = await caller.tokens(engine, "Once upon a time")
    assert (timings["output_tokens"], timings["prompt_tokens"]) == (4, len(prompt))
    assert min(timings["queue_s"], timings["prefill_s"], timings["decode_s"]) >= 0


async def test_timings_are_a_header_of_a_plain_answer(engine, caller):
    answer = await caller.generate(engine, caller.new_id(), caller.text(10), max_tokens=4, ignore_eos=True)
    timings = json.loads(answer.headers["x-trimtab-timings"])
    assert timings["output_tokens"] == 4
    assert timings["tokens_agree"] is None


async def test_stream_and_plain_answer_say_the_same(engine, caller):
    text = caller.text(10)
    plain = (await caller.generate(engine, caller.new_id(), text, max_tokens=caller.brief(300))).json()
    streamed = await caller.generate(engine, caller.new_id(), text, max_tokens=caller.brief(300), stream=True)
    assert "".join(pieces_of(events_of(streamed.text))) == plain["choices"][0]["text"]


@pytest.mark.emulated("a real model says what it likes")
async def test_the_model_ends_by_itself_sometime(engine, caller):
    answers = [
        (await caller.generate(engine, caller.new_id(), caller.text(5), max_tokens=2000)).json() for _ in range(5)
    ]
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
    lengths = {answer["usage"]["completion_tokens"] for answer in answers}
    assert len(lengths) > 1


async def test_min_tokens_holds_the_end_off(engine, caller):
    asked = {"max_tokens": caller.brief(500), "min_tokens": caller.brief(500)}
    answer = await caller.generate(engine, caller.new_id(), caller.text(5), **asked)
    assert answer.json()["usage"]["completion_tokens"] == caller.brief(500)


@pytest.mark.emulated("a real model says what it likes")
async def test_output_has_as_many_tokens_when_it_is_tokenized_again(engine, caller):
    text = caller.text(5)
    answer = (await caller.generate(engine, caller.new_id(), text, max_tokens=100)).json()
    whole = await caller.tokens(engine, text + answer["choices"][0]["text"])
    assert len(whole) == answer["usage"]["total_tokens"]


async def test_a_mismatch_of_tokens_is_served_and_counted_and_its_kv_is_not_used(engine, sender, caller):
    text = caller.text()
    prompt = await caller.tokens(engine, text)
    other = [*prompt[:40], prompt[40] ^ 1, *prompt[41:]]
    request_id, reserved = await caller.reserve(engine, other, -1)
    assert (await caller.send(sender, request_id, other, reserved, len(other) - 1)).status_code == 200
    before = await caller.metric(engine, "trimtab_engine_token_mismatch_total")
    answer = await caller.generate(engine, request_id, text, call={"prompt": other})
    assert answer.status_code == 200
    assert json.loads(answer.headers["x-trimtab-timings"])["tokens_agree"] is False
    assert await caller.metric(engine, "trimtab_engine_token_mismatch_total") == before + 1
    alone = await caller.generate(sender, caller.new_id(), text)
    assert answer.json()["choices"] == alone.json()["choices"]


async def test_choices_share_the_prompt_and_usage_adds_their_outputs(engine, caller):
    text = caller.text()
    asked = {"n": 3, "max_tokens": 10, "ignore_eos": True, "temperature": 1}
    answer = (await caller.generate(engine, caller.new_id(), text, **asked)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["usage"]["prompt_tokens"] == len(await caller.tokens(engine, text))


async def test_choices_prefill_their_prompt_once(engine, caller):
    text = caller.text()
    before = await caller.metric(engine, "trimtab_engine_prefill_tokens_total")
    await caller.generate(engine, caller.new_id(), text, n=3, max_tokens=4, ignore_eos=True)
    prefilled = await caller.metric(engine, "trimtab_engine_prefill_tokens_total") - before
    # The last token of a prompt is computed again where the rest is taken from the context cache. SGLang takes it from
    # there for all choices.
    again = 3 if engine.kind == "sglang" else 2
    assert prefilled <= len(await caller.tokens(engine, text)) + again


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("delivered", [1, 7, 19])
async def test_a_resumed_stream_has_no_gap_and_no_repeat(engine, sender, caller, api, delivered):
    whole = events_of(await stream(caller, engine, api, max_tokens=20, ignore_eos=True))
    before = pieces_of(whole)[:delivered]
    resume = [{"index": 0, "text": "".join(before), "tokens": delivered}]
    rest = events_of(await stream(caller, sender, api, resume, max_tokens=20, ignore_eos=True))
    assert comparable(engine, before + pieces_of(rest)) == comparable(engine, pieces_of(whole))
    assert {k: rest[-1]["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        k: whole[-1]["usage"][k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    if api == "chat":
        assert not any(event["choices"][0]["delta"].get("role") for event in rest[:-1])


async def test_a_resumed_stream_ends_where_the_model_would_have_ended_it(engine, sender, caller):
    whole = events_of(await stream(caller, engine, "chat", messages=QUESTION, max_tokens=2000))
    before = pieces_of(whole)[:-1]
    resume = [{"index": 0, "text": "".join(before), "tokens": len(before)}]
    rest = events_of(await stream(caller, sender, "chat", resume, messages=QUESTION, max_tokens=2000))
    assert comparable(engine, pieces_of(rest)) == pieces_of(whole)[-1:]
    assert finish_reasons_of(rest)[-1] == "stop"


async def test_choices_resume_each_from_where_it_was(engine, sender, caller):
    whole = events_of(await stream(caller, engine, "completions", n=2, max_tokens=12, ignore_eos=True))
    resume = [
        {"index": 0, "text": "".join(pieces_of(whole, 0)), "tokens": 12, "finish_reason": "length"},
        {"index": 1, "text": "".join(pieces_of(whole, 1)[:5]), "tokens": 5},
    ]
    rest = events_of(await stream(caller, sender, "completions", resume, n=2, max_tokens=12, ignore_eos=True))
    assert pieces_of(rest, 0) == []
    assert comparable(engine, pieces_of(rest, 1)) == comparable(engine, pieces_of(whole, 1)[5:])
    assert rest[-1]["usage"]["completion_tokens"] == 24


async def test_resuming_what_had_all_been_delivered_only_ends_it(engine, caller):
    whole = events_of(await stream(caller, engine, "completions", max_tokens=6, ignore_eos=True))
    resume = [{"index": 0, "text": "".join(pieces_of(whole)), "tokens": 6}]
    rest = events_of(await stream(caller, engine, "completions", resume, max_tokens=6, ignore_eos=True))
    assert "".join(pieces_of(rest)) == ""
    assert finish_reasons_of(rest) == ["length"]
    assert rest[-1]["usage"]["completion_tokens"] == 6


async def test_a_stop_string_held_back_before_a_resume_is_still_found(engine, sender, caller):
    pieces = pieces_of(events_of(await stream(caller, engine, "completions", max_tokens=12, ignore_eos=True)))
    stop = pieces[5][-2:] + pieces[6] + pieces[7][:2]
    asked = {"max_tokens": 12, "ignore_eos": True, "stop": stop}
    whole = pieces_of(events_of(await stream(caller, engine, "completions", **asked)))
    resume = [{"index": 0, "text": "".join(pieces[:5]), "tokens": 5}]
    rest = pieces_of(events_of(await stream(caller, sender, "completions", resume, **asked)))
    assert "".join(pieces[:5]) + "".join(rest) == "".join(whole) == "".join(pieces).partition(stop)[0]


async def test_a_client_that_leaves_ends_its_generation(engine, caller, eventually):
    body = {"model": engine.model, "prompt": "go on", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    aborts = await caller.metric(engine, "trimtab_engine_aborts_total")
    async with caller.http.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
        received = answer.aiter_bytes()
        await anext(received)
        assert (await caller.load(engine))["running"] == 1
    await eventually(lambda: caller.is_idle(engine))
    assert await caller.metric(engine, "trimtab_engine_aborts_total") == aborts + 1


async def test_abort_ends_a_running_generation(engine, caller, eventually):
    request_id = caller.new_id()
    asked = caller.generate(engine, request_id, "go on", max_tokens=5000, ignore_eos=True, stream=True)
    running = asyncio.create_task(asked)
    await eventually(lambda: caller.is_running(engine))
    assert (await caller.post(engine, "abort", request_id=request_id)).json() == {}
    assert pieces_of(events_of((await running).text))
    await eventually(lambda: caller.is_idle(engine))
