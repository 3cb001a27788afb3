"""What router and engines log of real requests: enough to find one by, and nothing that a client has said."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import MODEL, Fleet, StartFleet, text_of, until
from tests.support.logs import Said, listening

MARKER = "xyzzy-what-a-client-has-said"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
ROLES = {"e0": "prefill", "e1": "decode"}
IDS = random.Random(7).choices(range(200, 400), k=300)


@pytest.fixture
def said() -> Iterator[Said]:
    """The router's lines."""
    with listening("debug") as said:
        yield said


def body(**more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": MARKER, "max_tokens": 4, "ignore_eos": True} | more


def chat(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": MARKER}], "max_tokens": 4} | more


def engine_lines(folder: Path) -> list[dict[str, Any]]:
    """Every line of every engine; all of them are JSON."""
    return [json.loads(line) for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines()]


def check_secrecy(folder: Path, said: Said) -> None:
    everything = said.getvalue() + "".join(path.read_text() for path in folder.glob("*.log"))
    assert everything
    assert MARKER not in everything
    for separator in (", ", ","):
        assert separator.join(map(str, IDS[:4])) not in everything


async def post(fleet: Fleet, api: str, asked: object) -> int:
    content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    answer = await fleet.http.post(f"/v1/{api}", content=content, headers=HEADERS)
    return answer.status_code


async def test_what_clients_say_is_not_logged_whether_or_not_they_are_answered(
    start_fleet: StartFleet, said: Said, tmp_path: Path
) -> None:
    fleet = await start_fleet(2, engine={"log_level": "debug"}, router={"log_requests": "lines"})
    for pattern in ("data_parallel", "disaggregated"):
        await fleet.plan(pattern, ROLES)
        answered = [
            await post(fleet, "completions", body(prompt=text_of(200) + MARKER)),
            await post(fleet, "completions", body(prompt=IDS, stream=True)),
            await post(fleet, "chat/completions", chat()),
            await post(fleet, "chat/completions", chat(stream=True, stop=[MARKER])),
        ]
        refused = [
            await post(fleet, "completions", body(model=MARKER)),
            await post(fleet, "completions", body(stream=MARKER)),
            await post(fleet, "completions", body(temperature=MARKER)),
            await post(fleet, "completions", body(prompt=MARKER * 50_000)),
            await post(fleet, "completions", b'{"model": "' + MARKER.encode()),
            await post(fleet, "chat/completions", chat(messages=[{"role": MARKER, "content": MARKER}])),
            await post(fleet, "chat/completions", chat(messages=[{MARKER: MARKER}])),
            await post(fleet, "chat/completions", chat(messages=MARKER)),
            await post(fleet, "chat/completions", chat(tools=MARKER)),
        ]
        assert answered == [200] * 4
        assert all(status in (200, 400, 404) for status in refused)
        assert refused.count(200) <= 1
    check_secrecy(tmp_path, said)


async def test_what_is_asked_of_an_engine_directly_is_not_logged(
    start_fleet: StartFleet, said: Said, tmp_path: Path
) -> None:
    fleet = await start_fleet(1, engine={"log_level": "debug"})
    async with httpx.AsyncClient(base_url=fleet.engines["e0"].url) as engine:
        for verb in ("prep_recv", "remote_send", "start_generate", "abort"):
            for asked in ({"request_id": MARKER}, {"prompt": MARKER}, MARKER, {"request_id": "r", "prompt": IDS}):
                assert (await engine.post(f"/microserving/{verb}", json=asked)).status_code in (200, 400)
        asked = {"request_id": "r1", "api": "chat", "prompt": IDS, "body": chat(temperature=MARKER)}
        assert (await engine.post("/microserving/start_generate", json=asked)).status_code == 400
    check_secrecy(tmp_path, said)


async def test_every_line_about_a_request_names_it_and_its_trace(
    start_fleet: StartFleet, said: Said, tmp_path: Path, meddler: tuple
) -> None:
    meddling, flags = meddler
    meddling.corrupt = 2
    fleet = await start_fleet(2, per_engine={"e1": flags}, router={"log_requests": "lines"})
    await fleet.plan("disaggregated", ROLES)
    assert await post(fleet, "completions", body(prompt=text_of(300) + MARKER)) == 200
    ended = next(line for line in said.lines if line["event"] == "request_ended")
    ids = {"request_id": ended["request_id"], "trace_id": TRACE_ID}
    of_request = {"transfer_failed", "transfer refused", "request_ended"}
    lines = [line for line in said.lines + engine_lines(tmp_path) if line["event"] in of_request]
    assert [line["event"] for line in lines].count("transfer refused") == 2
    assert [line["event"] for line in lines].count("transfer_failed") == 2
    assert all(line | ids == line for line in lines)
    assert ended | {"outcome": "ok", "pattern": "disaggregated", "decode_engine": "e1"} == ended
    check_secrecy(tmp_path, said)


async def test_an_engine_that_dies_leaves_lines_that_lead_to_the_requests_it_had(
    start_fleet: StartFleet, said: Said, tmp_path: Path
) -> None:
    fleet = await start_fleet(2, engine={"profile": "laptop"}, router={"log_requests": "lines"})
    asked = body(prompt=text_of(100) + MARKER, max_tokens=200, stream=True)
    sent = asyncio.create_task(post(fleet, "completions", asked))
    busy = await until(lambda: next((each for each in fleet.desk.fleet if each.own_inflight), None), "one serves it")
    await fleet.engines[busy.engine_id].kill()
    assert await sent == 200
    lines = [line for line in said.lines if line["event"] in ("placement_failed", "request_ended")]
    assert {line["event"] for line in lines} == {"placement_failed", "request_ended"}
    assert len({(line["request_id"], line["trace_id"]) for line in lines}) == 1
    check_secrecy(tmp_path, said)


async def test_requests_are_logged_only_if_that_was_asked_for(start_fleet: StartFleet, said: Said) -> None:
    fleet = await start_fleet(1)
    assert await post(fleet, "completions", body()) == 200
    await fleet.settled()
    assert "request_ended" not in said.events


async def test_prompts_are_logged_only_if_that_was_asked_for(start_fleet: StartFleet, said: Said) -> None:
    fleet = await start_fleet(1, router={"log_requests": "prompts"})
    assert await post(fleet, "completions", body()) == 200
    await fleet.settled()
    (line,) = [line for line in said.lines if line["event"] == "request_ended"]
    assert json.loads(line["prompt"]) == MARKER
