"""info, load, config, drain, and the promise that no input takes an engine down."""

import asyncio
import json
import signal

import httpx
import pytest


async def test_info_says_what_the_engine_is(engine, caller):
    info = (await caller.http.get(f"{engine.url}/microserving/info")).json()
    assert info["url"] == engine.url
    assert info["protocol_version"] == 1
    assert info["kv_layout"]["model"] == info["model"]
    assert info["transports"]


async def test_an_idle_engine_reports_no_load(engine, caller):
    load = await caller.load(engine)
    names = ("running", "queued", "pending_prefill_tokens", "kv_used_tokens", "kv_reserved_tokens", "inbound_transfers")
    assert {name: load[name] for name in names} == dict.fromkeys(names, 0)
    assert load["draining"] is False


async def test_the_load_says_how_fast_prompts_are_computed_once_one_was(engine, caller):
    await caller.generate(engine, caller.new_id(), caller.text(400), max_tokens=1)
    assert (await caller.load(engine))["prefill_tokens_per_s"] > 0


async def test_knobs_are_live_and_an_absent_one_stays(engine, caller):
    before = await caller.load(engine)
    answer = await caller.post(engine, "config", chunked_prefill_tokens=32, prefill_decode_interval=3)
    assert answer.json() == {"chunked_prefill_tokens": 32, "prefill_decode_interval": 3}
    answer = await caller.post(engine, "config", prefill_decode_interval=0)
    assert answer.json() == {"chunked_prefill_tokens": 32, "prefill_decode_interval": 0}
    passes = await caller.metric(engine, "trimtab_engine_passes_total")
    text = caller.text()
    await caller.generate(engine, caller.new_id(), text, max_tokens=1)
    chunks = await caller.metric(engine, "trimtab_engine_passes_total") - passes
    assert chunks >= len(await caller.tokens(engine, text)) // 32
    names = ("chunked_prefill_tokens", "prefill_decode_interval")
    await caller.post(engine, "config", **{name: before[name] for name in names})


@pytest.mark.parametrize("knobs", [{"chunked_prefill_tokens": 15}, {"prefill_decode_interval": -1}])
async def test_a_bad_knob_is_refused_by_name_and_changes_nothing(engine, caller, knobs):
    before = await caller.load(engine)
    refused = await caller.post(engine, "config", **knobs)
    assert refused.status_code == 400
    (name,) = knobs
    assert name in refused.json()["error"]["message"]
    assert await caller.load(engine) == before


async def test_a_draining_engine_finishes_what_runs_and_refuses_the_rest(engine, sender, caller, eventually):
    prompt = await caller.tokens(engine, caller.text())
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    elsewhere, given = await caller.reserve(sender, prompt, -1)
    asked = {"n": 2, "max_tokens": caller.brief(600), "ignore_eos": True}
    running = asyncio.create_task(caller.generate(engine, caller.new_id(), "go on", **asked))
    await eventually(lambda: caller.is_running(engine))
    assert (await caller.post(engine, "drain", on=True)).json() == {"draining": True}
    load = await caller.load(engine)
    assert (load["draining"], load["kv_reserved_tokens"]) == (True, 0)
    body = {"model": engine.model, "prompt": "hello"}
    refused = [
        await caller.post(engine, "prep_recv", request_id="a", prompt=prompt, end=-1, ttl_s=5),
        await caller.send(engine, elsewhere, prompt, given, len(prompt) - 1),
        await caller.post(engine, "start_generate", request_id="b", api="completions", body=body),
        await caller.http.post(f"{engine.url}/v1/completions", json=body),
    ]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(503, "draining")}
    assert (await caller.http.get(f"{engine.url}/ready")).status_code == 503
    assert (await caller.http.get(f"{engine.url}/health")).status_code == 200
    late = await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)
    assert late.status_code == 410
    assert (await running).json()["usage"]["completion_tokens"] == 2 * caller.brief(600)
    await caller.post(engine, "drain", on=False)
    assert (await caller.generate(engine, caller.new_id(), "hello")).status_code == 200
    await caller.post(sender, "abort", request_id=elsewhere)


VERBS = ("prep_recv", "remote_send", "start_generate", "abort", "config", "drain")
NONSENSE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"request_id": 5, "prefill_decode_interval": "x"}',
    b"[" * 100_000,
    b'{"a":' * 5000,
]


@pytest.mark.parametrize("verb", VERBS)
async def test_nonsense_is_a_4xx_with_a_code_and_a_sentence(engine, caller, verb):
    for body in NONSENSE:
        answer = await caller.http.post(f"{engine.url}/microserving/{verb}", content=body)
        assert answer.status_code == 400, (verb, body[:20], answer.text)
        assert answer.json()["error"]["code"]
        assert answer.json()["error"]["message"]
    assert (await caller.http.get(f"{engine.url}/health")).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"kv_addr_info": "nonsense"},
        {"kv_addr_info": "é"},
        {"kv_addr_info": "e30="},
        {"kv_addr_info": "A" * 100_000},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [2**40]},
        {"begin": -5},
        {"end": 10**12},
    ],
)
async def test_a_bad_remote_send_is_a_4xx(engine, sender, caller, change):
    prompt = await caller.tokens(engine, caller.text(20))
    request_id, reserved = await caller.reserve(engine, prompt, -1)
    call = {
        "request_id": request_id,
        "prompt": prompt,
        "kv_addr_info": reserved["kv_addr_info"],
        "begin": reserved["prefix_matched_length"],
        "end": len(prompt) - 1,
    }
    answer = await caller.post(sender, "remote_send", **{**call, **change})
    assert answer.status_code == 400, answer.text
    assert (await caller.post(sender, "remote_send", **call)).status_code == 200
    await caller.post(engine, "abort", request_id=request_id)


@pytest.mark.parametrize("change", [{"ttl_s": 0}, {"ttl_s": -1}, {"prompt": []}, {"prompt": [2**31]}, {"end": "x"}])
async def test_a_bad_prep_recv_is_a_4xx(engine, caller, change):
    call = {"request_id": "x", "prompt": [1, 2, 3, 4], "end": 2, "ttl_s": 5}
    answer = await caller.post(engine, "prep_recv", **{**call, **change})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("ids", [[10**9], [-1], [5, 10**6, 5]])
async def test_token_ids_that_no_model_has_are_a_400_and_the_engine_lives(engine, caller, ids):
    body = {"model": engine.model, "prompt": ids, "max_tokens": 1}
    answers = [
        await caller.http.post(f"{engine.url}/v1/completions", json=body),
        await caller.post(engine, "start_generate", request_id=caller.new_id(), api="completions", body=body),
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert (await caller.generate(engine, caller.new_id(), "hello")).status_code == 200


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_the_transfer_port_survives_garbage(launch, sender, caller, free_port):
    port = free_port()
    receiver = launch(kv_port=port)
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"\0" * 8, b"\0\0\0\x02\0\0\0\0{}"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()
        writer.close()
    prompt = await caller.tokens(receiver, caller.text())
    request_id, reserved = await caller.reserve(receiver, prompt, -1)
    assert (await caller.send(sender, request_id, prompt, reserved, len(prompt) - 1)).status_code == 200


@pytest.mark.emulated("needs an engine with flags of its own")
async def test_a_body_over_the_limit_is_413(launch, caller):
    small = launch(max_body_bytes=2048)
    body = {"model": small.model, "prompt": "x" * 5000}
    declared = await caller.http.post(f"{small.url}/v1/completions", json=body)

    async def parts():
        for _ in range(50):
            yield b"x" * 100

    chunked = await caller.http.post(f"{small.url}/v1/completions", content=parts())
    assert {declared.status_code, chunked.status_code} == {413}
    assert declared.json()["error"]["code"] == "body_too_large"


@pytest.mark.emulated("needs an engine with flags of its own")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_engine_cleanly_even_in_mid_stream(launch, caller, number):
    engine = launch(drain_s=0.2)
    body = {"model": engine.model, "prompt": "go on", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    ended_properly = False
    async with caller.http.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
        received = answer.aiter_bytes()
        await anext(received)
        engine.process.send_signal(number)
        try:
            async for data in received:
                ended_properly |= b"[DONE]" in data
        except httpx.RemoteProtocolError as error:
            assert "peer closed" in str(error)  # noqa: PT017
    assert not ended_properly
    assert await asyncio.to_thread(engine.process.wait, 20) == 0


async def test_openapi_names_the_fields_of_every_verb(engine, caller):
    document = (await caller.http.get(f"{engine.url}/openapi.json")).json()
    body = document["paths"]["/microserving/prep_recv"]["post"]["requestBody"]
    schema = json.dumps(body["content"]["application/json"]["schema"])
    assert all(name in schema for name in ("request_id", "prompt", "end", "ttl_s"))
