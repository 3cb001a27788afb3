"""Spans of one process, sent to a collector on loopback."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from engines.errors import NoKvRoom
from engines.observability import Observability
from engines.tracing import UNTRACED, Trace, Untraced, open_tracer
from tests.support.fleet import until
from tests.support.logs import Said, listening
from tests.support.otlp import Collector, collecting

PARENT = Trace(b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", b"vendor=1")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def said() -> Iterator[Said]:
    """What is logged."""
    with listening() as said:
        yield said


def settings(collector: Collector, **more: object) -> Observability:
    return Observability(traces_url=collector.url, **more)


async def test_spans_are_sent_at_the_latest_when_the_process_ends(collector: Collector) -> None:
    async with open_tracer(settings(collector), "trimtab-test", "t0") as tracer:
        assert tracer is not None
        now_s = time.monotonic()
        with tracer.begin("POST /x", PARENT, now_s - 2.0) as span:
            span.past("prefill", now_s - 1.5, 0.5, {"trimtab.prefill.tokens": 7, "trimtab.absent": None})
            span.past("transfer", now_s, None)
    prefill, root = sorted(collector.spans, key=lambda each: each.name, reverse=True)
    assert (root.service, root.process, root.parent_id) == ("trimtab-test", "t0", "00f067aa0ba902b7")
    assert (prefill.parent_id, prefill.attributes) == (root.span_id, {"trimtab.prefill.tokens": 7})
    assert prefill.ended_ns - prefill.begun_ns == 500_000_000
    assert prefill.begun_ns - root.begun_ns == pytest.approx(500_000_000, abs=1000)
    assert abs(root.begun_ns / 1e9 - (time.time() - 2.0)) < 60


async def test_what_callees_continue_is_the_step_that_calls_them(collector: Collector) -> None:
    async with open_tracer(settings(collector), "trimtab-test", "t0") as tracer:
        with tracer.begin("POST /x", PARENT, time.monotonic()) as span, span.call("prep_recv", "e1") as step:
            trace = step.trace
    call = next(each for each in collector.spans if each.kind == "client")
    assert trace is not None
    assert trace.tracestate == PARENT.tracestate
    assert trace.traceparent.split(b"-")[:3] == [b"00", call.trace_id.encode(), call.span_id.encode()]
    assert trace.trace_id == PARENT.trace_id == call.trace_id
    assert call.attributes["trimtab.engine.id"] == "e1"


@pytest.mark.parametrize(
    ("error", "failed", "kind"),
    [
        (NoKvRoom("no room for 'my secret prompt'"), True, "no_kv_room"),
        (KeyError("my secret prompt"), True, "KeyError"),
        (asyncio.CancelledError(), False, "CancelledError"),
    ],
)
async def test_a_step_that_raises_has_failed_and_tells_no_more_than_a_word(
    collector: Collector, error: BaseException, failed: bool, kind: str
) -> None:
    async with open_tracer(settings(collector), "trimtab-test", "t0") as tracer:
        with pytest.raises(type(error)), tracer.begin("POST /x", None, time.monotonic()):
            raise error
    (span,) = collector.spans
    assert (span.failed, span.attributes) == (failed, {"error.type": kind})


async def test_what_is_not_sampled_is_neither_sent_nor_sampled_further_on(collector: Collector) -> None:
    async with open_tracer(settings(collector, traces_ratio=0.0), "trimtab-test", "t0") as tracer:
        with tracer.begin("POST /x", None, time.monotonic()) as span, span.step("part") as part:
            assert isinstance(part, Untraced)
            assert part.trace is not None
            assert int(part.trace.traceparent[-2:], 16) & 1 == 0
    assert collector.spans == []


async def test_the_ratio_is_of_traces_and_keeps_a_share(collector: Collector) -> None:
    async with open_tracer(settings(collector, traces_ratio=0.25), "trimtab-test", "t0") as tracer:
        for _ in range(400):
            tracer.begin("POST /x", None, time.monotonic()).end()
    assert 50 < len(collector.spans) < 150


async def test_a_collector_that_is_away_is_logged_once_and_once_more_when_it_is_back(
    collector: Collector, said: Said
) -> None:
    collector.status = 400
    lost: list[int] = []
    async with open_tracer(settings(collector), "trimtab-test", "t0", lost.append) as tracer:
        for batches in (1, 2):
            tracer.begin("POST /x", None, time.monotonic()).end()
            await until(lambda batches=batches: len(lost) == batches, "a batch is lost")
        collector.status = 200
        tracer.begin("POST /x", None, time.monotonic()).end()
        await until(lambda: collector.spans, "the collector is back")
    assert said.events == ["traces_not_taken", "traces_taken_again"]
    assert lost == [1, 1]


async def test_a_collector_that_is_not_there_holds_up_the_end_only_briefly(said: Said, free_port: object) -> None:
    lost: list[int] = []
    nobody = Observability(traces_url=f"http://127.0.0.1:{free_port()}")
    async with asyncio.timeout(30), open_tracer(nobody, "trimtab-test", "t0", lost.append) as tracer:
        for _ in range(2000):
            tracer.begin("POST /x", None, time.monotonic()).end()
    assert sum(lost) == 2000
    assert said.events == ["traces_not_taken"]


async def test_what_waits_for_the_collector_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines import otel

    monkeypatch.setattr(otel, "WAITING_SPANS", 600)
    monkeypatch.setattr(otel, "BATCH_SPANS", 600)
    monkeypatch.setattr(otel, "EVERY_MS", 60_000)
    lost: list[int] = []
    with collecting() as collector:
        async with open_tracer(settings(collector), "trimtab-test", "t0", lost.append) as tracer:
            for _ in range(599):
                tracer.begin("POST /x", None, time.monotonic()).end()
            monkeypatch.setattr(otel, "WAITING_SPANS", 599)
            for _ in range(10):
                tracer.begin("POST /x", None, time.monotonic()).end()
    assert sum(lost) == 10
    assert len(collector.spans) == 599


async def test_without_an_address_there_is_no_tracer() -> None:
    async with open_tracer(Observability(), "trimtab-test", "t0") as tracer:
        assert tracer is None
    assert UNTRACED.step("x") is UNTRACED
    assert UNTRACED.trace is None


@pytest.mark.parametrize("module", ["controller.router.app", "engines.emulated.process"])
def test_a_process_without_traces_does_not_load_what_makes_them(module: str) -> None:
    probe = (
        f"import sys, {module}\n"
        "print([name for name in sys.modules if name == 'engines.otel' or name.startswith('opentelemetry.exporter')])"
    )
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout.strip() == "[]"


def test_an_address_without_a_path_is_completed() -> None:
    assert Observability(traces_url="http://collector:4318").traces_url == "http://collector:4318/v1/traces"
    assert Observability(traces_url="http://collector/in").traces_url == "http://collector/in"
    assert Observability(traces_url="").traces_url is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"traces_url": "collector:4318"},
        {"traces_url": "http://"},
        {"traces_url": "http://me:secret@collector:4318"},
        {"traces_ratio": 1.5},
        {"log_level": "loud"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Observability(**wrong)


@pytest.mark.parametrize("header", [b"00-abc-def-01", b"", b"00-" + b"g" * 32 + b"-00f067aa0ba902b7-01"])
def test_a_header_that_is_not_w3c_has_no_trace_id(header: bytes) -> None:
    assert Trace(header).trace_id is None
