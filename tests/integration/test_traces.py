"""The trace of one request, over real processes and sockets, as a collector gets it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import engines.emulated
from tests.support.fleet import MODEL, StartFleet, text_of, until
from tests.support.otlp import BALANCED, Collector, collecting

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENT_SPAN}-01"
TOKENIZER = Path(engines.emulated.__file__).parent / "tokenizer"
ROLES = {"e0": "prefill", "e1": "decode"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def router_flags(collector: Collector, **more: object) -> dict[str, object]:
    return {"router_id": "r0", "traces_url": collector.url, "tokenizer": TOKENIZER, **more}


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}


async def test_a_balanced_request_is_one_tree_over_router_and_both_engines(
    start_fleet: StartFleet, collector: Collector
) -> None:
    fleet = await start_fleet(2, engine={"traces_url": collector.url}, router=router_flags(collector))
    plan = await fleet.plan("balanced", ROLES, offload_ratio=0.25)
    asked = body(text_of(400), stream=True)
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    answer = await fleet.http.post("/v1/completions", json=asked, headers=headers)
    assert answer.status_code == 200
    (record,) = await fleet.records(1)

    tree = await collector.tree(TRACE_ID, len(BALANCED.splitlines()))

    assert tree.drawn() == BALANCED
    (root,) = tree.roots
    assert root.parent_id == CLIENT_SPAN
    assert {span.tracestate for span in tree.spans} == {"vendor=1"}
    assert not any(span.failed for span in tree.spans)
    assert {span.service for span in tree.spans} == {"trimtab-router", "trimtab-engine"}
    expected = {
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "trimtab.request.id": record.request_id,
        "trimtab.pattern": "balanced",
        "trimtab.plan.version": plan.version,
        "trimtab.offload_ratio": 0.25,
        "trimtab.split.begin": 0,
        "trimtab.split.end": record.split_end,
        "trimtab.engine.prefill": "e0",
        "trimtab.engine.decode": "e1",
        "trimtab.transfer.bytes": record.transferred_bytes,
    }
    assert root.attributes | expected == root.attributes
    sent = tree.named("POST /microserving/remote_send", "server")
    assert sent.attributes["trimtab.transfer.bytes"] == record.transferred_bytes > 0
    assert sent.attributes["trimtab.split.end"] == record.split_end
    assert {span.attributes.get("trimtab.request.id") for span in tree.spans if span.kind == "server"} == {
        record.request_id
    }


async def test_parts_lie_within_the_steps_that_they_are_parts_of(start_fleet: StartFleet, collector: Collector) -> None:
    fleet = await start_fleet(2, engine={"traces_url": collector.url}, router=router_flags(collector))
    await fleet.plan("balanced", ROLES, offload_ratio=0.25)
    await fleet.http.post("/v1/completions", json=body(text_of(600)), headers={"traceparent": TRACEPARENT})
    tree = await collector.tree(TRACE_ID, len(BALANCED.splitlines()))
    slack_ns = 20_000_000  # modelled seconds against those that passed
    for span in tree.spans:
        for child in tree.children(span):
            assert span.begun_ns - slack_ns <= child.begun_ns <= child.ended_ns <= span.ended_ns + slack_ns, child.name
    prefill, transfer = (
        tree.named("transfer", "step"),
        tree.children(tree.named("POST /microserving/remote_send", "server")),
    )
    assert transfer[1].ended_ns == pytest.approx(prefill.begun_ns, abs=1000)


async def test_what_a_client_has_decided_about_its_trace_holds_and_others_are_traced_by_the_ratio(
    start_fleet: StartFleet, collector: Collector
) -> None:
    flags = router_flags(collector, traces_ratio=0.0)
    fleet = await start_fleet(1, engine={"traces_url": collector.url, "traces_ratio": 1.0}, router=flags)
    for parent in (None, f"00-{'1' * 32}-{CLIENT_SPAN}-00", TRACEPARENT):
        headers = {} if parent is None else {"traceparent": parent}
        assert (await fleet.http.post("/v1/completions", json=body("hello"), headers=headers)).status_code == 200
    await collector.tree(TRACE_ID, 6)
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}


async def test_a_request_without_a_trace_begins_one_and_a_broken_header_is_none(
    start_fleet: StartFleet, collector: Collector
) -> None:
    fleet = await start_fleet(1, engine={"traces_url": collector.url}, router=router_flags(collector))
    for headers in ({}, {"traceparent": "00-nonsense-01", "tracestate": "a=b"}):
        assert (await fleet.http.post("/v1/completions", json=body("hello"), headers=headers)).status_code == 200
    await until(lambda: len({span.trace_id for span in collector.spans}) == 2, "two traces")
    await until(lambda: len(collector.spans) == 12, "both are whole")
    roots = [span for span in collector.spans if not span.parent_id]
    assert [(span.kind, span.tracestate) for span in roots] == [("server", "")] * 2


async def test_a_transfer_that_fails_is_an_error_on_its_steps_and_not_on_the_request(
    start_fleet: StartFleet, collector: Collector, meddler: tuple
) -> None:
    meddling, flags = meddler
    meddling.corrupt = 2
    fleet = await start_fleet(
        2, engine={"traces_url": collector.url}, router=router_flags(collector), per_engine={"e1": flags}
    )
    await fleet.plan("disaggregated", ROLES)
    asked = body(text_of(400))
    answer = await fleet.http.post("/v1/completions", json=asked, headers={"traceparent": TRACEPARENT})
    assert answer.status_code == 200
    tree = await collector.tree(TRACE_ID, 13)
    sends = [span for span in tree.spans if span.name == "POST /microserving/remote_send"]
    assert [(span.kind, span.failed, span.attributes["error.type"]) for span in sends] == [
        (kind, True, "transfer_failed") for _ in range(2) for kind in ("client", "server")
    ]
    (root,) = tree.roots
    assert not root.failed
    assert root.attributes["trimtab.transfer.failures"] == 2


async def test_requests_that_fail_are_errors_and_those_that_make_no_sense_are_not(
    start_fleet: StartFleet, collector: Collector
) -> None:
    fleet = await start_fleet(1, engine={"traces_url": collector.url}, router=router_flags(collector))
    other, failing = "2" * 32, "3" * 32
    bad = {"traceparent": f"00-{other}-{CLIENT_SPAN}-01"}
    assert (await fleet.http.post("/v1/completions", json={"model": "none"}, headers=bad)).status_code == 404
    await fleet.engines["e0"].kill()
    dead = {"traceparent": f"00-{failing}-{CLIENT_SPAN}-01"}
    status = (await fleet.http.post("/v1/completions", json=body("hello"), headers=dead)).status_code
    (refused,) = (await collector.tree(other, 1)).roots
    (failed,) = (await collector.tree(failing, 1)).roots
    assert (refused.failed, refused.attributes["error.type"]) == (False, "model_not_found")
    assert (failed.failed, failed.attributes["http.response.status_code"]) == (True, status)


async def test_a_client_that_leaves_is_no_error_and_what_is_stopped_for_it_is_in_its_trace(
    start_fleet: StartFleet, collector: Collector
) -> None:
    fleet = await start_fleet(1, engine={"traces_url": collector.url}, router=router_flags(collector))
    asked = body("hello", max_tokens=500, stream=True)
    async with fleet.http.stream("POST", "/v1/completions", json=asked, headers={"traceparent": TRACEPARENT}) as answer:
        await anext(answer.aiter_bytes())
    tree = await collector.tree(TRACE_ID, 5)
    (root,) = tree.roots
    assert (root.failed, root.attributes["error.type"]) == (False, "client_left")
    assert {child.name for child in tree.children(root)} == {
        "POST /microserving/start_generate",
        "POST /microserving/abort",
    }
    generated = tree.named("POST /microserving/start_generate", "server")
    assert (generated.failed, generated.attributes["error.type"]) == (False, "broken_off")


async def test_a_collector_that_is_away_costs_its_spans_and_nothing_else(
    start_fleet: StartFleet, collector: Collector
) -> None:
    collector.status = 400
    fleet = await start_fleet(1, router=router_flags(collector))
    for _ in range(3):
        assert (await fleet.http.post("/v1/completions", json=body("hello"))).status_code == 200

    async def lost() -> float:
        lines = (await fleet.http.get("/metrics")).text.splitlines()
        (line,) = [line for line in lines if line.startswith("trimtab_spans_lost_total ")]
        return float(line.split()[1])

    await until(lambda: collector.refused, "the collector was asked")
    deadline = asyncio.get_running_loop().time() + 20
    while await lost() < 1:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    collector.status = 200
    await fleet.http.post("/v1/completions", json=body("hello"), headers={"traceparent": TRACEPARENT})
    await collector.tree(TRACE_ID, 2)


async def test_without_an_address_a_clients_trace_context_reaches_the_engines_as_it_came(
    start_fleet: StartFleet, collector: Collector
) -> None:
    fleet = await start_fleet(1, engine={"traces_url": collector.url}, router={"router_id": "r0"})
    await fleet.http.post("/v1/completions", json=body("hello"), headers={"traceparent": TRACEPARENT})
    tree = await collector.tree(TRACE_ID, 4)
    (root,) = tree.roots
    assert (root.process, root.parent_id) == ("e0", CLIENT_SPAN)
