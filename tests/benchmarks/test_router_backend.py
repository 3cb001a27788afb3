"""The benchmark's backend over loopback: it answers as an engine would, and its streams are whole."""

import asyncio
import json
import os
import time
from contextlib import closing

import httpx
import msgspec
import pytest

from benchmarks.router.backend import SLOT_NS, Backend, Wheel, start_timer
from benchmarks.router.wire import ORDER
from engines.protocol import TIMINGS_COMMENT, TIMINGS_HEADER
from engines.types import EngineInfo, EngineLoad, EngineTimings


@pytest.fixture
async def engine():
    wheel = Wheel(time.time_ns)
    timer = start_timer(SLOT_NS, wheel.turn)
    with closing(Backend(wheel, time.time_ns)) as backend:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{backend.port}", trust_env=False) as client:
            yield client
    asyncio.get_running_loop().remove_reader(timer)
    os.close(timer)


def body(stream, request=5, chunks=4, gap_us=2_000, **more):
    prompt = (b"why? " + ORDER % (request, gap_us, chunks)).decode()
    return {"model": "bench", "prompt": prompt, "stream": stream, **more}


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines[:-1]], lines[-1]


async def post(engine, path, document):
    return await engine.post(path, content=json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize(
    ("path", "text_of"),
    [
        ("/v1/completions", lambda answer: answer["choices"][0]["text"]),
        ("/v1/chat/completions", lambda answer: answer["choices"][0]["message"]["content"]),
        ("/generate", lambda answer: answer["text"]),
    ],
)
async def test_a_plain_answer_is_json_with_usage_and_names_its_request(engine, path, text_of):
    answer = (await post(engine, path, body(stream=False))).json()
    assert answer["usage"]["total_tokens"] == 116
    assert text_of(answer).split()[2] == "000005"


@pytest.mark.parametrize(
    ("path", "text_of"),
    [
        ("/v1/completions", lambda event: event["choices"][0]["text"]),
        ("/v1/chat/completions", lambda event: event["choices"][0]["delta"]["content"]),
        ("/generate", lambda event: event["text"]),
    ],
)
async def test_a_stream_has_each_chunk_once_in_order_and_ends_with_done(engine, path, text_of):
    answer = await post(engine, path, body(stream=True))
    chunks, last = events(answer.text)
    marks = [text_of(chunk).strip("@").split() for chunk in chunks]
    assert [int(mark[0]) for mark in marks] == [0, 1, 2, 3]
    assert {mark[2] for mark in marks} == {"000005"}
    assert last == "[DONE]"


async def test_chunks_of_a_stream_are_sent_at_least_about_a_gap_apart(engine):
    chunks, _ = events((await post(engine, "/v1/completions", body(stream=True, chunks=5, gap_us=4_000))).text)
    sent_ns = [int(chunk["choices"][0]["text"].split()[1]) for chunk in chunks]
    assert sent_ns == sorted(sent_ns)
    assert sent_ns[-1] - sent_ns[0] > 1_000_000


async def test_streams_at_the_same_time_do_not_mix(engine):
    answers = await asyncio.gather(
        *(post(engine, "/v1/completions", body(stream=True, request=number)) for number in range(20))
    )
    for number, answer in enumerate(answers):
        chunks, last = events(answer.text)
        assert {chunk["choices"][0]["text"].split()[2] for chunk in chunks} == {f"{number:06d}"}
        assert (len(chunks), last) == (4, "[DONE]")


async def test_start_generate_ends_a_stream_with_timings_and_heads_a_plain_answer_with_them(engine):
    call = {"request_id": "r", "api": "completions", "body": body(stream=True, stream_options={"include_usage": True})}
    streamed = (await post(engine, "/microserving/start_generate", call)).text
    comment, done = streamed.encode().split(b"\n\n")[-3:-1]
    assert done == b"data: [DONE]"
    assert msgspec.json.decode(comment.removeprefix(TIMINGS_COMMENT), type=EngineTimings).output_tokens == 100
    assert '"choices":[],"usage"' in streamed
    plain = await post(engine, "/microserving/start_generate", {**call, "body": body(stream=False)})
    assert msgspec.json.decode(plain.headers[TIMINGS_HEADER], type=EngineTimings).prompt_tokens == 16


async def test_start_generate_of_a_chat_answers_as_a_chat(engine):
    call = {"request_id": "r", "api": "chat", "body": body(stream=False)}
    answer = (await post(engine, "/microserving/start_generate", call)).json()
    assert answer["object"] == "chat.completion"


async def test_info_and_load_are_those_of_an_engine(engine):
    info = msgspec.json.decode((await engine.get("/microserving/info")).content, type=EngineInfo)
    load = msgspec.json.decode((await engine.get("/microserving/load")).content, type=EngineLoad)
    assert info.url == str(engine.base_url).rstrip("/")
    assert load.kv_free_tokens == info.kv_capacity_tokens


async def test_bad_http_ends_only_its_own_connection(engine):
    port = engine.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"this is not HTTP\r\n\r\n")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert (await engine.get("/health")).status_code == 200


async def test_a_client_that_leaves_mid_stream_does_not_disturb_others(engine):
    async with engine.stream("POST", "/v1/completions", content=json.dumps(body(stream=True, chunks=50))) as answer:
        await anext(answer.aiter_raw())
    chunks, last = events((await post(engine, "/v1/completions", body(stream=True))).text)
    assert (len(chunks), last) == (4, "[DONE]")
