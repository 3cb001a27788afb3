"""Every row of the design's failure table, caused for real: processes killed, sockets cut, bytes corrupted."""

import asyncio
import json

import httpx
import pytest

from engines.records import Outcome
from tests.support.fleet import MODEL, until
from tests.support.fleet import text_of as text
from tuner.slo import Slo, SloTable

SPLIT_ROLES = {"e0": "prefill", "e1": "decode"}


def completion(prompt: str, **given: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0} | given


async def ask(fleet, prompt: str, **given: object) -> dict:
    answer = await fleet.http.post("/v1/completions", json=completion(prompt, **given))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(fleet, body: dict, on_event=None, path: str = "/v1/completions") -> tuple[str, list[dict]]:
    """The text of a stream and its events; checks that it ended with [DONE]."""
    pieces, events, ended = [], [], False
    async with fleet.http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line:
                assert line.startswith("data: "), line
                events.append(json.loads(line[6:]))
                pieces += [c.get("text") or (c.get("delta") or {}).get("content") or "" for c in events[-1]["choices"]]
                if on_event is not None:
                    await on_event(len(events))
    assert ended, events[-1:]
    return "".join(pieces), events


def text_in(answer: dict) -> str:
    return answer["choices"][0]["text"]


async def test_no_room_on_d_goes_to_the_next_d(start_fleet):
    fleet = await start_fleet(3, per_engine={"e1": {"kv_capacity_tokens": 1600}})
    await fleet.plan("data_parallel", {"e0": "prefill", "e2": "prefill"})
    filling = asyncio.create_task(ask(fleet, text(1000, salt="first"), max_tokens=300))
    await until(lambda: _running(fleet, "e1"), "e1 is nearly full")
    await fleet.plan("disaggregated", {"e0": "prefill", "e1": "decode", "e2": "decode"}, policy="round_robin")
    for at in range(4):
        await ask(fleet, text(1000, salt=f"n{at}"))
    *records, _ = [await fleet.records(4), await filling]
    assert {record.decode_engine for record in records[0]} == {"e2"}
    assert all(record.transferred_bytes for record in records[0])
    await fleet.settled()


async def test_no_room_anywhere_waits_in_the_queue_before_any_prefill(start_fleet):
    fleet = await start_fleet(2, per_engine={"e1": {"kv_capacity_tokens": 1600}})
    await fleet.plan("disaggregated", SPLIT_ROLES)
    running = asyncio.create_task(ask(fleet, text(1000, salt="first"), max_tokens=150))
    await until(lambda: _running(fleet, "e1"), "the first request runs")
    waiting = asyncio.create_task(ask(fleet, text(1000, salt="second")))
    await until(lambda: len(fleet.desk.room) == 1, "the second request waits")
    prefill = await fleet.engines["e0"].load()
    assert (prefill.running, prefill.queued, prefill.pending_prefill_tokens) == (0, 0, 0)
    await asyncio.gather(running, waiting)
    _, second = await fleet.records(2)
    assert second.queue_s > 0
    assert second.outcome is Outcome.OK
    await fleet.settled()


@pytest.mark.parametrize("limits", [{"queue": 0}, {"queue_s": 0.2}])
async def test_no_room_and_no_place_to_wait_is_429_with_retry_after(start_fleet, limits):
    fleet = await start_fleet(2, router={"limits": limits}, per_engine={"e1": {"kv_capacity_tokens": 1600}})
    await fleet.plan("disaggregated", SPLIT_ROLES)
    running = asyncio.create_task(ask(fleet, text(1000, salt="first"), max_tokens=150))
    await until(lambda: _running(fleet, "e1"), "the first request runs")
    refused = await fleet.http.post("/v1/completions", json=completion(text(1000, salt="second")))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "no_room"
    await running
    await fleet.settled()


@pytest.mark.parametrize("fault", ["corrupt", "cut"])
async def test_a_broken_transfer_is_retried_into_the_same_reservation(start_fleet, meddler, fault):
    meddling, flags = meddler
    fleet = await start_fleet(2, per_engine={"e1": flags})
    expected = text_in(await ask(fleet, text(500)))
    await fleet.plan("disaggregated", SPLIT_ROLES)
    setattr(meddling, fault, 1)
    assert text_in(await ask(fleet, text(500, "other"))) != expected
    _, record = await fleet.records(2)
    assert (record.transfer_failures, record.attempts) == (1, 1)
    assert record.cached_tokens == record.prompt_tokens - 1
    await fleet.settled()


@pytest.mark.parametrize("fault", ["corrupt", "cut"])
async def test_a_transfer_that_keeps_failing_costs_time_but_never_the_answer(start_fleet, meddler, fault):
    meddling, flags = meddler
    fleet = await start_fleet(2, per_engine={"e1": flags})
    await fleet.plan("data_parallel", {"e0": "decode", "e1": "prefill"})
    expected = text_in(await ask(fleet, text(500)))
    await fleet.plan("disaggregated", SPLIT_ROLES)
    setattr(meddling, fault, 99)
    assert text_in(await ask(fleet, text(500))) == expected
    _, record = await fleet.records(2)
    assert (record.outcome, record.transfer_failures, record.cached_tokens) == (Outcome.OK, 2, 0)
    assert meddling.connections == 2
    await fleet.settled()


async def test_a_transfer_that_takes_too_long_is_given_up(start_fleet, meddler):
    meddling, flags = meddler
    fleet = await start_fleet(2, router={"timeouts": {"transfer_s": 0.5}}, per_engine={"e1": flags})
    await fleet.plan("disaggregated", SPLIT_ROLES)
    meddling.stall = 99
    await ask(fleet, text(500))
    (record,) = await fleet.records(1)
    assert (record.outcome, record.transfer_failures, record.cached_tokens) == (Outcome.OK, 2, 0)
    await fleet.settled()


async def test_p_dies_during_prefill_and_d_recomputes(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("disaggregated", SPLIT_ROLES)
    asking = asyncio.create_task(ask(fleet, text(6000)))
    await until(lambda: _prefilling(fleet, "e0"), "P prefills")
    await fleet.engines["e0"].kill()
    await asking
    (record,) = await fleet.records(1)
    assert (record.outcome, record.decode_engine, record.cached_tokens) == (Outcome.OK, "e1", 0)
    await fleet.settled()


async def test_p_dies_during_prefill_and_another_p_takes_over(start_fleet):
    fleet = await start_fleet(3)
    await fleet.plan("disaggregated", {"e0": "prefill", "e1": "decode", "e2": "prefill"})
    asking = asyncio.create_task(ask(fleet, text(6000)))
    busy = await until(lambda: _prefilling(fleet, "e0") or _prefilling(fleet, "e2"), "a P prefills")
    await fleet.engines[busy].kill()
    await asking
    (record,) = await fleet.records(1)
    assert (record.outcome, record.prefill_engine) == (Outcome.OK, ({"e0", "e2"} - {busy}).pop())
    assert record.cached_tokens == record.prompt_tokens - 1
    await fleet.settled()


@pytest.mark.parametrize("pattern", ["data_parallel", "disaggregated"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_d_dies_before_the_first_token_and_the_request_is_placed_again(start_fleet, pattern, streamed):
    fleet = await start_fleet(3)
    await fleet.plan(pattern, {"e0": "prefill", "e1": "decode", "e2": "decode"})
    body = completion(text(6000))
    asking = asyncio.create_task(stream(fleet, body) if streamed else ask(fleet, text(6000)))
    busy = await until(lambda: _working(fleet, "e1") or _working(fleet, "e2"), "a D works")
    await fleet.engines[busy].kill()
    await asking
    (record,) = await fleet.records(1)
    assert (record.outcome, record.decode_engine) == (Outcome.OK, ({"e1", "e2"} - {busy}).pop())
    await fleet.settled()


async def test_after_max_attempts_the_client_is_told(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("data_parallel", max_attempts=1)
    asking = asyncio.create_task(fleet.http.post("/v1/completions", json=completion(text(6000))))
    busy = await until(lambda: _working(fleet, "e0") or _working(fleet, "e1"), "an engine works")
    await fleet.engines[busy].kill()
    answer = await asking
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_failed"
    (record,) = await fleet.records(1)
    assert (record.outcome, record.attempts) == (Outcome.FAILED, 1)
    await fleet.settled()


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("pattern", ["data_parallel", "balanced"])
async def test_d_dies_mid_stream_and_the_stream_goes_on_without_gap_or_repeat(start_fleet, api, pattern):
    fleet = await start_fleet(3)
    body = completion("the quick brown fox " * 50, max_tokens=60, stream_options={"include_usage": True})
    path = "/v1/completions"
    if api == "chat":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        path = "/v1/chat/completions"
    expected, _ = await stream(fleet, body, path=path)
    knobs = {"offload_ratio": 0.2} if pattern == "balanced" else {}
    await fleet.plan(pattern, {"e0": "prefill", "e1": "decode", "e2": "decode"}, **knobs)

    async def kill_at_the_twentieth(events: int) -> None:
        if events == 20:
            busy = _working(fleet, "e1") or _working(fleet, "e2")
            await fleet.engines[busy].kill()

    got, events = await stream(fleet, body, kill_at_the_twentieth, path)
    assert got == expected
    assert events[-1]["usage"]["completion_tokens"] == 60
    assert len({event["id"] for event in events}) == 1
    assert sum(bool(c.get("delta", {}).get("role")) for event in events for c in event["choices"]) == (api == "chat")
    _, record = await fleet.records(2)
    assert (record.outcome, record.resumed, record.output_tokens) == (Outcome.OK, 1, 60)
    await fleet.settled()


async def test_a_stream_goes_on_elsewhere_when_its_engine_falls_silent_and_its_heartbeat_ends(start_fleet, redis_url):
    fleet = await start_fleet(
        2, {"redis_url": redis_url, "heartbeat_s": 0.2}, {"engines": [], "timeouts": {"verb_s": 0.5}}
    )
    await fleet.plan("data_parallel")
    body = completion("the quick brown fox " * 50, max_tokens=60)
    expected, _ = await stream(fleet, body)

    async def silence_at_the_twentieth(events: int) -> None:
        if events == 20:  # no socket is closed, as when a host is gone
            busy = _working(fleet, "e0") or _working(fleet, "e1")
            fleet.engines[busy].freeze()

    got, _ = await asyncio.wait_for(stream(fleet, body, silence_at_the_twentieth), 60)
    assert got == expected
    _, record = await fleet.records(2)
    assert (record.outcome, record.resumed) == (Outcome.OK, 1)


async def test_several_choices_go_on_too(start_fleet):
    fleet = await start_fleet(2)
    body = completion("the quick brown fox " * 20, max_tokens=40, n=2)

    def by_choice(events: list[dict]) -> list[str]:
        choices = [choice for event in events for choice in event["choices"]]
        return ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)]

    _, expected = await stream(fleet, body)

    async def kill(events: int) -> None:
        if events == 30:
            await fleet.engines[_working(fleet, "e0") or _working(fleet, "e1")].kill()

    _, events = await stream(fleet, body, kill)
    assert by_choice(events) == by_choice(expected)
    await fleet.settled()


async def test_a_stream_whose_last_engine_dies_ends_with_an_error_event(start_fleet):
    fleet = await start_fleet(1)
    lines = []
    async with fleet.http.stream(
        "POST", "/v1/completions", json=completion("hi", max_tokens=200, stream=True)
    ) as answer:
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
                if len(lines) == 5:
                    await fleet.engines["e0"].kill()
    assert json.loads(lines[-1][6:])["error"]["code"] in ("engine_failed", "no_engine")
    (record,) = await fleet.records(1)
    assert record.outcome is Outcome.FAILED
    await fleet.settled()


async def test_at_most_max_inflight_transfers_reach_one_d_and_others_wait_before_prefill(start_fleet):
    fleet = await start_fleet(2)
    await fleet.plan("disaggregated", SPLIT_ROLES, max_inflight_transfers=2)
    asking = [asyncio.create_task(ask(fleet, text(3000, salt=f"n{at}"))) for at in range(6)]
    seen = []
    while not all(task.done() for task in asking):
        seen.append((fleet.desk.fleet["e1"].own_transfers, len(fleet.desk.room)))
        await asyncio.sleep(0.005)
    await asyncio.gather(*asking)
    assert max(transfers for transfers, _ in seen) == 2
    assert max(waiting for _, waiting in seen) >= 1
    assert {record.outcome for record in await fleet.records(6)} == {Outcome.OK}
    await fleet.settled()


async def test_overload_with_admission_off_queues_on_the_engine(start_fleet):
    fleet = await start_fleet(1)
    await fleet.plan("data_parallel", admission="off", max_running_per_engine=1)
    await asyncio.gather(*(ask(fleet, text(50, salt=f"n{at}")) for at in range(5)))
    assert {record.outcome for record in await fleet.records(5)} == {Outcome.OK}


@pytest.mark.parametrize("pattern", ["data_parallel", "disaggregated"])
async def test_overload_with_admission_queue_holds_requests_in_the_router(start_fleet, pattern):
    fleet = await start_fleet(2)
    await fleet.plan(pattern, SPLIT_ROLES, admission="queue", max_running_per_engine=1)
    asking = [asyncio.create_task(ask(fleet, text(50, salt=f"n{at}"))) for at in range(5)]
    most = 0
    while not all(task.done() for task in asking):
        most = max(most, fleet.desk.fleet["e1"].own_inflight)
        await asyncio.sleep(0.002)
    await asyncio.gather(*asking)
    assert most == 1
    assert {record.outcome for record in await fleet.records(5)} == {Outcome.OK}
    await fleet.settled()


async def test_overload_with_admission_shed_refuses_what_cannot_meet_its_slo(start_fleet):
    fleet = await start_fleet(1, router={"load_poll_s": 10})
    await fleet.plan("disaggregated", admission="shed")
    asking = asyncio.create_task(ask(fleet, text(7000, "long")))
    await until(lambda: fleet.desk.fleet["e0"].own_pending_tokens > 2000, "a long prompt is pending")
    fleet.desk.fleet["e0"].view.prefill_tokens_per_s = 1000.0
    shed = await fleet.http.post("/v1/completions", json=completion(text(100)))
    assert (shed.status_code, shed.json()["error"]["code"]) == (429, "shed")
    assert "retry-after" in shed.headers
    await asking
    assert {record.outcome for record in await fleet.records(2)} == {Outcome.OK, Outcome.SHED}
    await fleet.settled()


@pytest.mark.parametrize("pattern", ["data_parallel", "disaggregated"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_frees_everything_it_held(start_fleet, pattern, phase):
    fleet = await start_fleet(2)
    await fleet.plan(pattern, SPLIT_ROLES)
    prompt = text(7000) if phase == "prefill" else text(100)
    body = completion(prompt, max_tokens=500, stream=True)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.running.url.rsplit(":", 1)[1]))
    raw = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
    if phase == "decode":
        await reader.readuntil(b"data: ")
    else:
        await until(lambda: _working(fleet, "e0") or _working(fleet, "e1"), "an engine works")
    writer.close()
    await fleet.settled()
    (record,) = await fleet.records(1)
    assert record.outcome is Outcome.CLIENT_LEFT


async def test_a_client_that_gives_up_after_its_ttft_bound_has_not_got_what_was_promised(start_fleet):
    fleet = await start_fleet(1)
    table = SloTable(version=1, classes={"default": Slo(ttft_ms=1, tpot_ms=1000)})
    await fleet.store.compare_and_set(fleet.keys.slo, table.model_dump_json().encode(), None)
    await until(lambda: fleet.running.service._board.slos.version == 1, "the SLO is in force")
    with pytest.raises(httpx.ReadTimeout):
        await fleet.http.post("/v1/completions", json=completion(text(7000)), timeout=0.1)
    (record,) = await fleet.records(1)
    assert record.outcome is Outcome.GAVE_UP
    await fleet.settled()


async def test_a_fleet_that_takes_nothing_now_says_so_and_when_to_come_back(start_fleet):
    fleet = await start_fleet(1, router={"load_poll_s": 10})
    await fleet.http.post(f"{fleet.engines['e0'].url}/microserving/drain", json={"on": True})
    refused = await fleet.http.post("/v1/completions", json=completion(text(50)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
    assert refused.headers["retry-after"]
    (record,) = await fleet.records(1)
    assert record.outcome is Outcome.NO_ROOM


async def test_a_plain_answer_that_takes_too_long_is_not_begun_again_elsewhere(start_fleet):
    fleet = await start_fleet(2, router={"timeouts": {"answer_s": 0.3}})
    late = await fleet.http.post("/v1/completions", json=completion(text(50), max_tokens=2000))
    assert late.status_code == 504
    (record,) = await fleet.records(1)
    assert (record.outcome, record.attempts) == (Outcome.TIMEOUT, 1)
    await fleet.settled()


async def test_a_frozen_engine_is_left_alone_once_it_stops_answering(start_fleet):
    fleet = await start_fleet(2, router={"timeouts": {"verb_s": 0.3}})
    fleet.engines["e0"].freeze()
    await until(lambda: fleet.desk.fleet.available == 1, "the frozen engine is noticed")
    for at in range(3):
        await ask(fleet, text(50, salt=f"n{at}"))
    assert {record.decode_engine for record in await fleet.records(3)} == {"e1"}
    fleet.engines["e0"].thaw()
    await until(lambda: fleet.desk.fleet.available == 2, "it is used again")


async def test_no_engine_at_all_is_503_at_once_and_not_ready(start_fleet):
    fleet = await start_fleet(1)
    await fleet.engines["e0"].kill()
    await until(lambda: fleet.desk.fleet.available == 0, "the death is noticed")
    answer = await fleet.http.post("/v1/completions", json=completion("hi"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine")
    assert (await fleet.http.get("/ready")).status_code == 503
    assert (await fleet.http.get("/health")).status_code == 200


def _working(fleet, engine_id: str) -> str | None:
    """The engine's name while this router has a generation on it."""
    return engine_id if fleet.desk.fleet[engine_id].own_inflight else None


def _prefilling(fleet, engine_id: str) -> str | None:
    return engine_id if fleet.desk.fleet[engine_id].own_pending_tokens else None


async def _running(fleet, engine_id: str) -> bool:
    return (await fleet.engines[engine_id].load()).running > 0
