"""What `trimtab top` computes and draws."""

from collections.abc import Callable, Sequence

import msgspec
import pytest
from rich.console import Console

from controller.cli.top_drawing import draw, kv_bar
from controller.heartbeats import RouterBeat
from controller.store import Keys, MemoryStore
from controller.top import Observer, Percentiles, View, percentile, percentiles, summarize
from engines.records import Outcome, RequestRecord
from engines.telemetry import Heartbeat
from engines.types import EngineInfo, EngineLoad, KvLayout
from tuner.plan import IssuedBy, Knobs, Plan
from tuner.slo import Slo, SloTable

MODEL = "test-model"
NOW_S = 1_700_000_000.0
SLOS = SloTable(
    version=1,
    classes={"default": Slo(ttft_ms=1000, tpot_ms=100), "chat": Slo(ttft_ms=200, tpot_ms=50, attainment=0.5)},
)
PLAN = Plan(
    version=7,
    issued_at_s=NOW_S,
    issued_by=IssuedBy.OPERATOR,
    reason="try it",
    pattern="balanced",
    knobs=Knobs(offload_ratio=0.1),
)
ROUTER = RouterBeat(router_id="router-1", url="http://127.0.0.1:8080", plan_version=7)
LAYOUT = KvLayout(model=MODEL, dtype="bfloat16", layers=2, kv_heads=2, head_dim=8)

MakeRecord = Callable[..., RequestRecord]


@pytest.fixture
def record() -> MakeRecord:
    made = 0

    def make(**fields: object) -> RequestRecord:
        nonlocal made
        made += 1
        defaults: dict[str, object] = {
            "request_id": f"r{made}",
            "router_id": "router-1",
            "slo_class": "default",
            "arrived_at_s": NOW_S - 5,
            "outcome": Outcome.OK,
            "status": 200,
            "api": "chat",
            "stream": True,
            "pattern": "balanced",
            "plan_version": 7,
            "ttft_s": 0.1,
            "tpot_s": 0.02,
            "e2e_s": 1.0,
        }
        return RequestRecord(**(defaults | fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def engine() -> Heartbeat:
    info = EngineInfo(
        engine_id="e0",
        url="http://127.0.0.1:9000",
        kind="test",
        model=MODEL,
        context_length_tokens=1000,
        kv_capacity_tokens=1000,
        kv_layout=LAYOUT,
        transports=("tcp",),
        epoch="1",
    )
    load = EngineLoad(running=3, queued=2, pending_prefill_tokens=1234, kv_used_tokens=500, kv_capacity_tokens=1000)
    return Heartbeat(info=info, load=load)


def view_of(records: Sequence[RequestRecord], routers: Sequence[RouterBeat] = (ROUTER,), **how: object) -> View:
    given: dict[str, object] = {"slos": SLOS, "plan": PLAN, "engines": (), "window_s": 10.0} | how
    return summarize(MODEL, records, routers=routers, **given)  # type: ignore[arg-type]


def drawn(view: View) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(view))
    return captured.get()


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0), (list(range(1, 101)), 0.95, 95)],
)
def test_percentiles_are_values_that_were_measured(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_percentiles_leave_out_what_was_not_measured() -> None:
    assert percentiles([None, 1.0, None]) == Percentiles(1.0, 1.0, 1.0)


def test_goodput_counts_only_requests_that_met_both_bounds(record: MakeRecord) -> None:
    records = [record(), record(ttft_s=2.0), record(tpot_s=0.2), record(tpot_s=None), record(outcome=Outcome.FAILED)]
    view = view_of(records)
    assert view.goodput == pytest.approx(2 / 10)
    assert view.offered_rate == pytest.approx(5 / 10)


def test_attainment_is_by_class_against_that_classs_bounds(record: MakeRecord) -> None:
    view = view_of([record(slo_class="chat", ttft_s=0.5), record(slo_class="chat"), record(ttft_s=0.5)])
    assert {one.name: one.attainment for one in view.classes} == {"chat": 0.5, "default": 1.0}


def test_an_unknown_class_counts_as_default(record: MakeRecord) -> None:
    view = view_of([record(slo_class="gone")])
    assert {one.name: one.finished for one in view.classes} == {"chat": 0, "default": 1}


def test_wrong_requests_and_clients_that_left_do_not_count_against_the_fleet(record: MakeRecord) -> None:
    view = view_of([record(), record(outcome=Outcome.REJECTED), record(outcome=Outcome.CLIENT_LEFT)])
    assert view.classes[1].attainment == 1.0
    assert view.outcomes == {"ok": 1, "rejected": 1, "client_left": 1}


def test_requests_in_flight_are_demand_too(record: MakeRecord) -> None:
    busy = msgspec.structs.replace(ROUTER, inflight=19)
    assert view_of([record()], routers=(busy,)).offered_rate == pytest.approx(20 / 10)


def test_the_view_names_who_served_what(record: MakeRecord) -> None:
    view = view_of([record(), record(pattern="data_parallel", plan_version=6)])
    assert view.patterns == {"balanced v7": 1, "data_parallel v6": 1}


class TestObserver:
    async def test_reads_new_records_forgets_old_ones_and_counts_none_twice(self, record: MakeRecord) -> None:
        store, stream = MemoryStore(), Keys(MODEL).requests

        async def finished(*records: RequestRecord) -> None:
            await store.append(stream, [msgspec.json.encode(one) for one in records], 1000)

        observer = Observer(store, MODEL, window_s=10)
        old, again = record(arrived_at_s=NOW_S - 60), record()
        await finished(old, again)
        assert (await observer.view(NOW_S)).outcomes == {"ok": 1}
        await finished(again, record(outcome=Outcome.SHED))
        assert (await observer.view(NOW_S)).outcomes == {"ok": 1, "shed": 1}
        assert (await observer.view(NOW_S + 60)).outcomes == {}
        await store.aclose()

    async def test_survives_what_it_cannot_read(self, record: MakeRecord) -> None:
        store, keys = MemoryStore(), Keys(MODEL)
        await store.append(keys.requests, [b"{", msgspec.json.encode(record())], 1000)
        await store.compare_and_set(keys.plan, b"?", None)
        await store.compare_and_set(keys.slo, b"?", None)
        await store.heartbeat(keys.router("r"), b"?", 60)
        view = await Observer(store, MODEL, window_s=10).view(NOW_S)
        assert (view.outcomes, view.plan, view.routers) == ({"ok": 1}, None, ())
        await store.aclose()


class TestDrawing:
    def test_everything_is_on_the_screen(self, record: MakeRecord, engine: Heartbeat) -> None:
        screen = drawn(view_of([record(), record(outcome=Outcome.NO_ROOM)], engines=(engine,)))
        for part in (
            "test-model",
            "0.10/s",
            "v7 balanced",
            "offload_ratio=0.1",
            "50.0%",
            "90%",
            "100",
            "20",
            "no_room 1",
        ):
            assert part in screen
        for part in ("router-1", "e0", "mixed", "1,234 tok", "████····", "50%"):
            assert part in screen

    @pytest.mark.parametrize(
        ("routers", "with_engine", "says"),
        [
            ((), False, "trimtab up"),
            ((ROUTER,), False, "No engine is alive"),
            ((ROUTER,), True, "send one to http://127.0.0.1:8080/v1"),
            ((msgspec.structs.replace(ROUTER, inflight=3),), True, "3 are under way"),
        ],
    )
    def test_an_empty_view_says_why(
        self, routers: Sequence[RouterBeat], with_engine: bool, says: str, engine: Heartbeat
    ) -> None:
        assert says in drawn(view_of([], routers=routers, engines=(engine,) if with_engine else ()))

    def test_without_a_plan_it_says_what_issues_one(self) -> None:
        assert "trimtab controller" in drawn(view_of([], plan=None))

    @pytest.mark.parametrize(
        ("used", "reserved", "capacity", "cells"),
        [
            (0, 0, 100, "········ 0%"),
            (50, 25, 100, "████▒▒·· 50%"),
            (200, 50, 100, "████████ 200%"),
            (0, 0, 0, "–"),
        ],
    )
    def test_kv_bar_never_outgrows_its_width(self, used: int, reserved: int, capacity: int, cells: str) -> None:
        assert kv_bar(used, reserved, capacity).plain == cells
