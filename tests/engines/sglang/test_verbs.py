"""The verbs over HTTP, with two engines that have everything but SGLang."""

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis
from structlog.testing import capture_logs

from engines.records import TransferRecord
from engines.sglang.engine import Engine
from engines.sglang.lifetime import extend_lifespan, running
from engines.sglang.settings import load_settings
from engines.sglang.wire import Held, decode_address, decode_note
from engines.telemetry import Recorder
from tests.support.sglang_verbs import Alphabet, Served, served


@pytest.fixture
async def two(pair, free_port):
    """Sender and receiver, strangers to each other."""
    pair.sender.transport.known.clear()
    pair.receiver.transport.known.clear()
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(served(pair.sender, pair.clock, free_port()))
        receiver = await stack.enter_async_context(served(pair.receiver, pair.clock, free_port()))
        yield sender, receiver


PROMPT = list(range(100, 121))


async def reserve(receiver: Served, **more: Any) -> dict[str, Any]:
    call = {"request_id": "q", "prompt": PROMPT, "end": -1, "ttl_s": 30, **more}
    answer = await receiver.post("prep_recv", **call)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def order(reserved: dict[str, Any], **more: Any) -> dict[str, Any]:
    call = {"request_id": "q", "prompt": PROMPT, "kv_addr_info": reserved["kv_addr_info"]}
    return {**call, "begin": reserved["prefix_matched_length"], "end": len(PROMPT) - 1, **more}


async def test_strangers_meet_and_transfer(two):
    sender, receiver = two
    for request_id in ("q", "q2"):
        reserved = await reserve(receiver, request_id=request_id)
        sent = await sender.post("remote_send", **order(reserved, request_id=request_id))
        assert sent.status_code == 200, sent.text
    assert sent.json()["bytes"] == 0
    again = await reserve(receiver, request_id="q3")
    assert again["prefix_matched_length"] == len(PROMPT) - 1
    assert (await receiver.load())["kv_reserved_tokens"] == 0


async def test_two_strangers_that_send_to_each_other_at_once_meet(two):
    one, other = two
    back = list(range(200, 221))
    there, here = await reserve(other), await reserve(one, request_id="p", prompt=back)
    answers = await asyncio.gather(
        one.post("remote_send", **order(there)), other.post("remote_send", **order(here, request_id="p", prompt=back))
    )
    assert [each.status_code for each in answers] == [200, 200], [each.text for each in answers]


async def test_an_address_whose_rows_were_changed_on_the_way_is_refused_before_anything_is_written(two, pair):
    sender, receiver = two
    reserved = await reserve(receiver)
    address = decode_address(reserved["kv_addr_info"])
    for rows in ([(0, 2**50)], [(first + 1, count) for first, count in address.rows], []):
        changed = msgspec.structs.replace(address, rows=rows).encode()
        refused = await sender.post("remote_send", **order({**reserved, "kv_addr_info": changed}))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request")
    assert pair.network.writes == 0


@pytest.mark.parametrize("with_checksums", [False, True])
async def test_a_send_is_through_when_the_receiver_holds_it_whatever_the_senders_scheduler_has_heard(
    make_pair, free_port, monkeypatch, with_checksums
):
    pair = make_pair(with_checksums=with_checksums)
    notes = pair.sender.transport.take_notes
    monkeypatch.setattr(
        pair.sender.transport,
        "take_notes",
        lambda: [(agent, raw) for agent, raw in notes() if type(decode_note(raw)) is not Held],
    )
    async with (
        served(pair.sender, pair.clock, free_port()) as sender,
        served(pair.receiver, pair.clock, free_port()) as receiver,
    ):
        sent = await sender.post("remote_send", **order(await reserve(receiver)))
        assert sent.status_code == 200, sent.text
        again = await reserve(receiver, request_id="q2")
        assert again["prefix_matched_length"] == len(PROMPT) - 1
    (told,) = (record for record in sender.engine._recorder.take() if isinstance(record, TransferRecord))
    assert told.bytes == sent.json()["bytes"] > 0


async def test_corrupt_bytes_fail_a_send_that_is_checked(make_pair, free_port):
    pair = make_pair(with_checksums=True)
    pair.network.corrupt = True
    async with (
        served(pair.sender, pair.clock, free_port()) as sender,
        served(pair.receiver, pair.clock, free_port()) as receiver,
    ):
        failed = await sender.post("remote_send", **order(await reserve(receiver)))
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "transfer_failed")


async def test_what_a_reservation_took_counts_with_its_transfer(two):
    sender, receiver = two
    reserved = await reserve(receiver)
    address = msgspec.structs.replace(decode_address(reserved["kv_addr_info"]), reserve_s=2.0)
    sent = await sender.post("remote_send", **order({**reserved, "kv_addr_info": address.encode()}))
    assert sent.status_code == 200, sent.text
    (told,) = (record for record in sender.engine._recorder.take() if isinstance(record, TransferRecord))
    assert told.wall_s == pytest.approx(2.0 + sent.json()["transfer_s"])


async def test_what_a_send_waits_before_its_first_pass_is_queue(two, pair, monkeypatch):
    sender, receiver = two
    prefill = sender.serving.prefill

    async def late(rid: str, ids: list[int]) -> None:
        pair.clock.pass_by(5.0)
        await prefill(rid, ids)

    monkeypatch.setattr(sender.engine.sending, "_prefill", late)
    sent = (await sender.post("remote_send", **order(await reserve(receiver)))).json()
    assert sent["queue_s"] == pytest.approx(5.0)
    assert sent["prefill_s"] - sent["queue_s"] == pytest.approx(0.3)


async def test_a_receiver_that_is_gone_fails_the_transfer_at_once(two):
    sender, receiver = two
    reserved = await reserve(receiver)
    receiver.server.should_exit = True
    while receiver.server.started and receiver.server.servers[0].is_serving():
        await asyncio.sleep(0.01)
    failed = await sender.post("remote_send", **order(reserved))
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "transfer_failed")


async def test_another_life_of_the_receiver_is_noticed_when_they_meet(two):
    sender, receiver = two
    reserved = await reserve(receiver)
    receiver.engine._description = type(receiver.engine._description)(
        **{
            **{
                name: getattr(receiver.engine._description, name)
                for name in receiver.engine._description.__struct_fields__
            },
            "peer": type(receiver.engine.me)(
                **{
                    **{name: getattr(receiver.engine.me, name) for name in receiver.engine.me.__struct_fields__},
                    "epoch": "later",
                }
            ),
        }
    )
    refused = await sender.post("remote_send", **order(reserved))
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "reservation_gone")


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"kv_addr_info": "nonsense"}, 400, "bad_request"),
        ({"prompt": [-1]}, 400, "bad_request"),
        ({"prompt": [5000]}, 400, "bad_request"),
        ({"prompt": []}, 400, "bad_request"),
        ({"end": 10**9}, 400, "bad_request"),
        ({"begin": 3}, 400, "bad_request"),
        ({"request_id": "other"}, 410, "reservation_gone"),
    ],
)
async def test_a_bad_send_is_refused_before_anything_is_computed(two, change, status, code):
    sender, receiver = two
    reserved = await reserve(receiver)
    refused = await sender.post("remote_send", **order(reserved, **change))
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert sender.scheduler.view.cached == {}


async def test_engines_with_other_layouts_exchange_nothing(make_pair, free_port):
    pair = make_pair(models=("m", "another"))
    async with (
        served(pair.sender, pair.clock, free_port()) as sender,
        served(pair.receiver, pair.clock, free_port()) as receiver,
    ):
        refused = await sender.post("remote_send", **order(await reserve(receiver)))
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "kv_layout_mismatch")


async def test_an_abort_ends_a_send(two, pair):
    sender, receiver = two
    pair.network.slow = True
    sending = asyncio.create_task(sender.post("remote_send", **order(await reserve(receiver))))
    while not pair.network.writes:
        await asyncio.sleep(0.01)
    assert (await sender.post("abort", request_id="q")).json() == {}
    refused = await sending
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "bad_request")
    pair.network.slow = False
    while pair.receiver.handler.reservations.writing:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "change", [{"ttl_s": 0}, {"ttl_s": -1}, {"prompt": []}, {"prompt": [5000]}, {"end": "x"}, {"end": 21}, {"end": 0}]
)
async def test_a_bad_reservation_is_a_4xx_and_holds_nothing(two, change):
    _, receiver = two
    call = {"request_id": "q", "prompt": PROMPT, "end": -1, "ttl_s": 5, **change}
    assert (await receiver.post("prep_recv", **call)).status_code == 400
    assert (await receiver.load())["kv_reserved_tokens"] == 0


async def test_no_room_says_when_to_ask_again(two):
    _, receiver = two
    long = list(range(100, 200))
    answer = await receiver.post("prep_recv", request_id="q", prompt=long, end=-1, ttl_s=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "no_kv_room")
    assert int(answer.headers["retry-after"]) >= 1


async def test_abort_frees_a_reservation_and_may_be_repeated(two):
    _, receiver = two
    await reserve(receiver)
    for _ in range(2):
        assert (await receiver.post("abort", request_id="q")).json() == {}
    assert (await receiver.load())["kv_reserved_tokens"] == 0


async def test_a_draining_engine_refuses_all_new_work(two):
    engine, other = two
    reserved = await reserve(other)
    assert (await engine.post("drain", on=True)).json() == {"draining": True}
    refused = [
        await engine.post("prep_recv", request_id="q", prompt=PROMPT, end=-1, ttl_s=5),
        await engine.post("remote_send", **order(reserved)),
        await engine.generate(),
        await engine.http.post(f"{engine.url}/v1/completions", json={}),
    ]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(503, "draining")}
    assert (await engine.http.get(f"{engine.url}/ready")).status_code == 503
    assert (await engine.load())["draining"] is True
    await engine.post("drain", on=False)
    assert (await engine.http.post(f"{engine.url}/v1/completions", json={})).text == '"own"'
    assert (await engine.generate()).status_code == 200


async def test_a_plain_answer_carries_its_id_and_timings(two):
    engine, _ = two
    answer = await engine.generate(prompt=[ord(character) for character in "abc"])
    assert answer.json() == {"id": "cmpl-q", "choices": [{"index": 0, "text": "def"}]}
    timings = json.loads(answer.headers["x-trimtab-timings"])
    assert (timings["prompt_tokens"], timings["cached_tokens"], timings["output_tokens"]) == (3, 2, 3)
    assert timings["tokens_agree"] is True


def events_of(text: str) -> list[dict[str, Any]]:
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


def texts_of(text: str, index: int = 0) -> list[str]:
    choices = [choice for event in events_of(text) for choice in event["choices"]]
    return [choice["text"] for choice in choices if choice["index"] == index]


async def test_a_stream_ends_with_timings_just_before_done(two):
    engine, _ = two
    answer = await engine.generate(body={"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert texts_of(answer.text) == ["d", "e", "f"]
    assert {event["id"] for event in events_of(answer.text)} == {"cmpl-q"}
    comment = answer.text.split("\n\n")[-3]
    assert comment.startswith(": trimtab ")
    assert json.loads(comment.removeprefix(": trimtab "))["output_tokens"] == 3


async def test_a_mismatch_of_tokens_is_served_counted_and_loses_its_reservation(two):
    engine, _ = two
    await reserve(engine)
    answer = await engine.generate(prompt=[1, 2, 3])
    assert json.loads(answer.headers["x-trimtab-timings"])["tokens_agree"] is False
    metrics = (await engine.http.get(f"{engine.url}/metrics")).text
    assert f'trimtab_engine_token_mismatch_total{{engine="{engine.engine.info.engine_id}"}} 1.0' in metrics
    assert (await engine.load())["kv_reserved_tokens"] == 0


@pytest.mark.parametrize("counted", [1, 2])
async def test_a_resumed_stream_has_no_gap_and_no_repeat_though_its_events_had_several_tokens(two, counted):
    engine, _ = two
    whole = texts_of((await engine.generate(body={"stream": True, "max_tokens": 6})).text)
    resume = [{"index": 0, "text": "".join(whole[:2]), "tokens": counted}]
    rest = await engine.generate(body={"stream": True, "max_tokens": 6}, resume=resume)
    assert whole[:2] + texts_of(rest.text) == whole
    timings = json.loads(rest.text.split("\n\n")[-3].removeprefix(": trimtab "))
    assert (timings["prompt_tokens"], timings["output_tokens"]) == (3, 6)


async def test_each_choice_resumes_from_where_it_was(two):
    engine, _ = two
    body = {"stream": True, "max_tokens": 4, "n": 2}
    resume = [
        {"index": 0, "text": "defg", "tokens": 4, "finish_reason": "length"},
        {"index": 1, "text": "d", "tokens": 1},
    ]
    rest = (await engine.generate(body=body, resume=resume)).text
    assert texts_of(rest, 0) == []
    assert texts_of(rest, 1) == ["e", "f", "g"]
    timings = json.loads(rest.split("\n\n")[-3].removeprefix(": trimtab "))
    assert (timings["prompt_tokens"], timings["output_tokens"]) == (3, 8)


async def test_what_was_all_delivered_is_only_ended(two):
    engine, _ = two
    resume = [{"index": 0, "text": "def", "tokens": 3}]
    rest = (await engine.generate(body={"stream": True, "max_tokens": 3}, resume=resume)).text
    assert [choice["finish_reason"] for event in events_of(rest) for choice in event["choices"]] == ["length"]
    assert "".join(texts_of(rest)) == ""


async def test_a_stop_string_that_began_before_a_resume_is_found(two):
    engine, _ = two
    resume = [{"index": 0, "text": "de", "tokens": 2}]
    body = {"stream": True, "max_tokens": 9, "stop": "efg"}
    rest = (await engine.generate(body=body, resume=resume)).text
    assert events_of(rest)[-1]["choices"][0]["finish_reason"] == "stop"
    assert "".join(texts_of(rest)) == "f"


@pytest.mark.parametrize(
    "call",
    [
        {"body": {"prompt": "abc"}, "resume": [{"index": 0, "text": "d", "tokens": 1}]},
        {"body": []},
        {"body": "x"},
        {"api": "embeddings"},
        {"resume": 5},
    ],
)
async def test_a_bad_generate_is_a_400(two, call):
    engine, _ = two
    answer = await engine.post(
        "start_generate", **{"request_id": "q", "api": "completions", "body": {"prompt": "a"}, **call}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "bad_request"


async def test_resuming_a_choice_that_was_not_asked_for_is_refused(two):
    engine, _ = two
    resume = [{"index": 7, "text": "d", "tokens": 1}]
    answer = await engine.generate(body={"stream": True}, resume=resume)
    assert answer.status_code == 400
    assert "resume names choice 7" in answer.text


async def test_what_sglang_refuses_is_refused_in_openais_shape(two):
    engine, _ = two
    answer = await engine.post("start_generate", request_id="q", api="completions", body={})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("bad_request", "invalid_request_error")
    assert error["message"] == "there is no prompt"


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_ends_its_generation(two, streamed):
    engine, _ = two
    engine.serving.pause_s = 0.05
    body = {"max_tokens": 500, "stream": streamed}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await engine.generate(body=body)
    while not engine.serving.aborted:
        await asyncio.sleep(0.01)
    assert engine.engine._generations == {}


async def test_abort_reaches_a_running_generation(two):
    engine, _ = two
    engine.serving.pause_s = 0.05
    running = asyncio.create_task(engine.generate(body={"stream": True, "max_tokens": 8}))
    while not engine.engine._generations:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await engine.post("abort", request_id="q")
    assert engine.serving.aborted
    await running


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send", "start_generate", "abort", "config", "drain", "kv_peer"])
async def test_nonsense_is_a_400_with_a_code(two, verb):
    engine, _ = two
    for body in (b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 9000):
        answer = await engine.http.post(f"{engine.url}/microserving/{verb}", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "bad_request"


async def test_a_body_over_the_limit_is_a_413(two):
    engine, _ = two
    answer = await engine.http.post(f"{engine.url}/microserving/prep_recv", content=b" " * 100_001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_knobs_answer_with_what_is_in_force(two):
    engine, _ = two
    answer = await engine.post("config", prefill_decode_interval=2)
    assert answer.json() == {"chunked_prefill_tokens": 64, "prefill_decode_interval": 2}
    refused = await engine.post("config", chunked_prefill_tokens=1)
    assert "chunked_prefill_tokens" in refused.json()["error"]["message"]


async def test_load_is_told_from_memory_while_the_scheduler_is_in_a_long_pass(two):
    engine, _ = two
    await reserve(engine)
    before = await engine.load()
    engine.engine.bridge._send = lambda payload: None
    assert await engine.load() == before


async def test_an_engine_is_announced_with_its_load_and_its_passes(pair, redis_url, free_port):
    serving = Alphabet(pair.sender)
    recorder = Recorder()
    engine = Engine(serving, pair.sender.handler.on_call, recorder, pair.clock, pair.clock)
    pair.sender.view.on_report = engine.bridge.on_report
    frontend = SimpleNamespace(model="m", host_port=("127.0.0.1", 7), start=lambda: None)
    settings = load_settings(redis_url=redis_url, heartbeat_s=0.05, kind="k")
    app = FastAPI()
    extend_lifespan(app, lambda: running(frontend, engine, recorder, settings, lambda _: None))
    async with Redis.from_url(redis_url) as redis:
        async with app.router.lifespan_context(app):
            list(pair.sender.prefill("tt-1-x", b"\1\0\0\0" * 9))
            async with asyncio.timeout(20):
                while not await redis.xlen("trimtab:m:passes"):
                    await asyncio.sleep(0.02)
            heartbeat = json.loads(await redis.get("trimtab:m:engine:s"))
            assert heartbeat["info"]["url"] == "http://127.0.0.1:7"
            assert heartbeat["load"]["kv_capacity_tokens"] == 64
        ((_, fields),) = await redis.xrange("trimtab:m:passes")
        assert json.loads(fields[b"value"])["prefill_tokens"] == 9
        assert await redis.get("trimtab:m:engine:s") is None


async def test_without_redis_an_engine_serves_all_the_same(pair):
    engine = Engine(Alphabet(pair.sender), pair.sender.handler.on_call, Recorder(), pair.clock, pair.clock)
    pair.sender.view.on_report = engine.bridge.on_report
    frontend = SimpleNamespace(model="m", host_port=("127.0.0.1", 7), start=lambda: None)
    async with running(frontend, engine, Recorder(), load_settings(), lambda _: None):
        async with asyncio.timeout(20):
            while engine._info is None:
                await asyncio.sleep(0.01)
        assert engine.info.kind == "sglang-cpu-m"


async def test_a_defect_of_what_announces_an_engine_is_said_and_the_server_runs_on(pair):
    def broken(_):
        raise RuntimeError("no such collector")

    engine = Engine(Alphabet(pair.sender), pair.sender.handler.on_call, Recorder(), pair.clock, pair.clock)
    pair.sender.view.on_report = engine.bridge.on_report
    frontend = SimpleNamespace(model="m", host_port=("127.0.0.1", 7), start=lambda: None)
    with capture_logs() as lines:
        async with running(frontend, engine, Recorder(), load_settings(), broken), asyncio.timeout(20):
            while not any(line["log_level"] == "error" for line in lines):
                await asyncio.sleep(0.01)
    assert "restart it" in lines[-1]["event"]
