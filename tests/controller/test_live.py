"""`GET /v1/live`: what is counted where, and that the work is bounded."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import SecretStr

from controller.admin.app import create_app
from controller.admin.figures import FRESH_S, Figures
from controller.admin.live import RECENT_S, STEPS, LiveView
from controller.admin.plans import PlanChange
from controller.admin.services import Services
from controller.heartbeats import RouterBeat
from controller.store import Keys, MemoryStore
from controller.streams import FIRST
from engines.records import ArrivalBatch, Outcome, RequestRecord
from tuner.slo import Slo

MODEL = "test-model"
KEYS = Keys(MODEL)
NOW_S = 1_700_000_000.0


@dataclass
class Traffic:
    """Writes what routers write."""

    store: MemoryStore
    written: int = field(default=0)

    async def end(self, ago_s: float, **changes: object) -> str:
        """A request that ended `ago_s` before now, after 2 s, within the bootstrap SLO unless changed."""
        self.written += 1
        record = RequestRecord(
            request_id=str(changes.pop("request_id", f"r{self.written}")),
            router_id="router-0",
            slo_class="default",
            arrived_at_s=NOW_S - ago_s - 2,
            outcome=Outcome.OK,
            status=200,
            api="chat",
            stream=True,
            pattern="data_parallel",
            plan_version=1,
            ttft_s=0.5,
            tpot_s=0.02,
            e2e_s=2.0,
        )
        record = msgspec.structs.replace(record, **changes)
        await self.store.append(KEYS.requests, [msgspec.json.encode(record)], 100_000)
        return record.request_id

    async def arrive(self, ago_s: Sequence[float], slo_class: str = "default") -> None:
        count = len(ago_s)
        self.written += 1
        batch = ArrivalBatch(
            router_id="router-0",
            request_ids=tuple(f"a{self.written}-{number}" for number in range(count)),
            arrived_at_s=tuple(NOW_S - each for each in ago_s),
            prompt_tokens=(10,) * count,
            prompt_bytes=(40,) * count,
            slo_classes=(slo_class,) * count,
            plan_versions=(1,) * count,
            prefix_hashes=((),) * count,
        )
        await self.store.append(KEYS.arrivals, [msgspec.json.encode(batch)], 100_000)


@dataclass
class Clock:
    at_s: float = 0.0

    def __call__(self) -> float:
        self.at_s += 2 * FRESH_S
        return self.at_s


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def traffic(store: MemoryStore) -> Traffic:
    return Traffic(store)


@pytest.fixture
async def services(store: MemoryStore) -> AsyncIterator[Services]:
    services = Services.wire(store, MODEL, lambda: NOW_S - 1000, lambda: ("data_parallel", "disaggregated", "balanced"))
    await services.bootstrap()
    yield services
    await store.aclose()


@pytest.fixture
def view(services: Services, store: MemoryStore) -> LiveView:
    return LiveView(services, Figures(store, KEYS, Clock()), lambda: NOW_S)


async def test_goodput_counts_where_a_request_ended_and_demand_where_it_arrived(
    view: LiveView, traffic: Traffic
) -> None:
    await traffic.end(ago_s=12)
    await traffic.arrive([14, 14])
    live = await view.answer(300)
    bucket = int((NOW_S - 12 - live.begin_s) // live.bucket_s)
    earlier = int((NOW_S - 14 - live.begin_s) // live.bucket_s)
    assert live.bucket_s == 5
    assert live.series.goodput_rps[bucket] == pytest.approx(1 / 5)
    assert live.series.offered_rps[earlier] == pytest.approx(2 / 5)
    assert sum(each or 0 for each in live.series.goodput_rps) == pytest.approx(1 / 5)


async def test_only_requests_within_both_bounds_are_good(view: LiveView, traffic: Traffic) -> None:
    await traffic.end(ago_s=10)
    await traffic.end(ago_s=10, tpot_s=None)
    await traffic.end(ago_s=10, ttft_s=2.5)
    await traffic.end(ago_s=10, tpot_s=0.2)
    await traffic.end(ago_s=10, outcome=Outcome.SHED, ttft_s=None, tpot_s=None)
    recent = (await view.answer(300)).recent
    assert (recent.finished, recent.good, recent.attainment) == (5, 2, pytest.approx(0.4))
    assert recent.goodput_rps == pytest.approx(2 / RECENT_S)


async def test_wrong_and_abandoned_requests_count_nowhere(view: LiveView, traffic: Traffic) -> None:
    await traffic.end(ago_s=10, outcome=Outcome.REJECTED)
    await traffic.end(ago_s=10, outcome=Outcome.CLIENT_LEFT)
    recent = (await view.answer(300)).recent
    assert (recent.finished, recent.attainment) == (0, None)


async def test_a_record_that_was_sent_twice_counts_once(view: LiveView, traffic: Traffic) -> None:
    again = await traffic.end(ago_s=10)
    await traffic.end(ago_s=10, request_id=again)
    assert (await view.answer(300)).recent.finished == 1


async def test_classes_have_their_own_bounds_and_unknown_ones_count_as_default(
    view: LiveView, traffic: Traffic, services: Services
) -> None:
    await services.slos.put("chat", Slo(ttft_ms=100, tpot_ms=100))
    await traffic.end(ago_s=10, slo_class="chat")
    await traffic.end(ago_s=10, slo_class="gone")
    live = await view.answer(300)
    assert [(each.name, each.recent.good, each.recent.finished) for each in live.classes] == [
        ("chat", 0, 1),
        ("default", 1, 1),
    ]


async def test_a_changed_slo_judges_at_once_what_has_ended_before(
    view: LiveView, traffic: Traffic, services: Services
) -> None:
    await traffic.end(ago_s=10)
    before = await view.answer(300)
    await services.slos.put("default", Slo(ttft_ms=100, tpot_ms=100))
    after = await view.answer(300)
    assert (before.recent.good, after.recent.good) == (1, 0)
    assert after.slo_version == before.slo_version + 1


async def test_percentiles_are_of_what_was_answered_lately(view: LiveView, traffic: Traffic) -> None:
    for ttft_s in (0.1, 0.2, 0.3):
        await traffic.end(ago_s=10, ttft_s=ttft_s)
    await traffic.end(ago_s=10, ttft_s=9.0, outcome=Outcome.FAILED)
    await traffic.end(ago_s=RECENT_S + 10, ttft_s=9.0)
    (default,) = (await view.answer(300)).classes
    assert default.recent.ttft_s is not None
    assert (default.recent.ttft_s.p50, default.recent.ttft_s.p99) == (0.2, 0.3)


async def test_attainment_of_a_bucket_without_requests_is_not_known(view: LiveView, traffic: Traffic) -> None:
    await traffic.end(ago_s=10)
    attainment = (await view.answer(300)).series.attainment
    assert sorted(attainment, key=str) == [1.0] + [None] * (STEPS - 1)


async def test_buckets_are_the_same_in_later_answers(services: Services, store: MemoryStore, traffic: Traffic) -> None:
    times = iter([NOW_S, NOW_S + 1])
    view = LiveView(services, Figures(store, KEYS, Clock()), lambda: next(times))
    await traffic.end(ago_s=33)
    first, second = await view.answer(300), await view.answer(300)
    assert (second.begin_s - first.begin_s) % first.bucket_s == 0
    assert first.begin_s % first.bucket_s == 0


async def test_only_the_newest_are_kept_and_what_was_before_is_not_known(
    services: Services, store: MemoryStore, traffic: Traffic
) -> None:
    figures = Figures(store, KEYS, Clock(), limit=10)
    view = LiveView(services, figures, lambda: NOW_S)
    await traffic.end(ago_s=250)
    first = await view.answer(300)
    for number in range(10):
        await traffic.end(ago_s=50 - number)
    second = await view.answer(300)
    assert len(figures.finished.rows) == 10
    assert None not in first.series.goodput_rps
    assert second.series.goodput_rps[0] is None
    assert sum(each or 0 for each in second.series.goodput_rps) * 5 == pytest.approx(10)


async def test_a_first_reading_that_cannot_see_all_says_so(store: MemoryStore, traffic: Traffic) -> None:
    await traffic.end(ago_s=1)
    (entry,) = await store.latest(KEYS.requests, 1)
    copies = [entry.value.replace(b'"r1"', b'"c%d"' % number) for number in range(FIRST + 5)]
    await store.append(KEYS.requests, copies, 100_000)
    figures = Figures(store, KEYS, Clock())
    await figures.catch_up()
    assert len(figures.finished.rows) == FIRST
    assert figures.finished.known_from_s == NOW_S - 1


async def test_watchers_share_a_reading(store: MemoryStore, traffic: Traffic) -> None:
    figures = Figures(store, KEYS, lambda: 5.0)
    await figures.catch_up()
    await traffic.end(ago_s=10)
    await figures.catch_up()
    assert len(figures.finished.rows) == 0


async def test_plans_are_marked_when_they_came_into_force(store: MemoryStore) -> None:
    times = [NOW_S - 1000, NOW_S - 500, NOW_S - 100]
    services = Services.wire(store, MODEL, lambda: times[0], lambda: ("data_parallel", "disaggregated"))
    await services.plans.bootstrap()
    for pattern in ("disaggregated", "data_parallel"):
        times.pop(0)
        await services.plans.issue(PlanChange(pattern=pattern, reason=f"try {pattern}"))
    view = LiveView(services, Figures(store, KEYS, Clock()), lambda: NOW_S)
    live = await view.answer(300)
    assert live.plan_version == 3
    assert [(mark.version, mark.at_s, mark.reason) for mark in live.plans] == [
        (2, NOW_S - 500, "try disaggregated"),
        (3, NOW_S - 100, "try data_parallel"),
    ]


async def test_empty_answers_say_why(view: LiveView, store: MemoryStore, traffic: Traffic) -> None:
    async def why() -> str:
        return str((await view.answer(300)).why_empty)

    assert "No router is alive" in await why()
    beat = RouterBeat(router_id="router-0", url="http://127.0.0.1:1", plan_version=1, inflight=3)
    await store.heartbeat(KEYS.router("router-0"), msgspec.json.encode(beat), 60)
    assert "No engine is alive" in await why()
    await traffic.end(ago_s=10)
    live = await view.answer(300)
    assert (live.why_empty, live.inflight) == (None, 3)


@pytest.mark.parametrize(("span_s", "status"), [(60, 200), (1800, 200), (59, 422), (1801, 422)])
async def test_the_span_is_bounded(services: Services, span_s: int, status: int) -> None:
    transport = httpx.ASGITransport(create_app(services, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        answer: Any = await client.get("/v1/live", params={"span_s": span_s})
    assert answer.status_code == status
    if status == 200:
        assert len(answer.json()["series"]["goodput_rps"]) == STEPS


async def test_it_needs_the_token(services: Services) -> None:
    transport = httpx.ASGITransport(create_app(services, SecretStr("operator")))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        assert (await client.get("/v1/live")).status_code == 401
