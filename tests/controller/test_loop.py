"""The control tick on a clock turned by hand: real store, documents, window and tuner; the search is scripted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from controller.admin.modes import ModeChange
from controller.admin.plans import PlanChange
from controller.search_worker import WorkerFailed
from controller.store import StoreUnavailable
from engines.types import Role
from tests.support.control_world import (
    KEYS,
    Controller,
    World,
)
from tuner.candidates import candidate_of, explicit_knobs, split
from tuner.plan import HotPrefix, IssuedBy
from tuner.slo import Slo
from tuner.types import Mode, Reason


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.store.aclose()


@pytest.fixture
async def leader(world: World) -> Controller:
    """The only controller, on a fleet of two with half a minute of traffic."""
    made = world.controller()
    await made.services.bootstrap()
    await world.goes_on(30)
    return made


async def test_a_better_plan_is_published_by_the_tuner_and_written_down_with_its_evidence(leader: Controller) -> None:
    record = await leader.tick()
    plan = await leader.services.plans.current()
    assert record is not None
    assert plan is not None
    assert (plan.version, plan.issued_by, plan.pattern) == (2, IssuedBy.TUNER, "balanced")
    assert sorted(plan.roles.values()) == [Role.DECODE, Role.PREFILL]
    assert (record.plan_version, record.published_version, record.refused) == (1, 2, None)
    kept = (await leader.services.decisions.page(10)).decisions
    assert [each.model_dump_json(exclude={"id"}) for each in kept] == [record.model_dump_json(exclude={"id"})]
    assert kept[0].search is not None
    assert [each.goodput_rps for each in kept[0].search.ranked] == [10.0, 5.0]


async def test_copies_of_a_hot_context_are_published_under_the_plan_that_stays(world: World) -> None:
    world.begins_with, leader = (1, 2, 3), world.controller()
    await leader.services.bootstrap()
    await world.goes_on(30)
    leader.search.best = lambda task: candidate_of(task.plan, task.engines)
    leader.search.copies = True
    record = await leader.tick()
    plan = await leader.services.plans.current()
    assert record is not None
    assert plan is not None
    assert (record.reason, plan.version, plan.pattern) == (Reason.HOT_PREFIX, 2, "data_parallel")
    assert plan.replicas == (HotPrefix(prefix=f"{3:016x}", blocks=4, engines=("e0", "e1")),)


async def test_the_search_gets_the_traffic_by_arrival_the_live_engines_and_the_plan_in_force(
    leader: Controller,
) -> None:
    await leader.tick()
    (task,) = leader.search.tasks
    assert task.workload.rate_rps == pytest.approx(10, rel=0.1)
    assert [engine.engine_id for engine in task.engines] == ["e0", "e1"]
    assert task.plan.version == 1


async def test_once_the_plan_is_the_best_known_it_stays(world: World, leader: Controller) -> None:
    await leader.tick()
    for _ in range(5):
        await world.goes_on(plan_version=2)
        record = await leader.tick()
        assert record is not None
        assert record.published_version is None
    assert (await leader.services.plans.history())[0].version == 2


@pytest.mark.parametrize(
    ("mode", "reason", "searched"),
    [(Mode.ADVISORY, Reason.ADVISORY, 1), (Mode.MANUAL, Reason.PINNED, 1), (Mode.PAUSED, Reason.PAUSED, 0)],
)
async def test_no_other_mode_than_auto_publishes(leader: Controller, mode: Mode, reason: Reason, searched: int) -> None:
    await leader.services.modes.put(ModeChange(mode=mode))
    record = await leader.tick()
    assert record is not None
    assert (record.reason, record.mode, record.published_version) == (reason, mode, None)
    assert len(leader.search.tasks) == searched
    assert (record.proposed is not None) == (searched == 1)
    assert len(await leader.services.plans.history()) == 1


async def test_a_mode_that_changes_during_the_search_holds_its_plan_back(leader: Controller) -> None:
    async def pause() -> None:
        await leader.services.modes.put(ModeChange(mode=Mode.PAUSED))

    leader.search.meanwhile = pause
    record = await leader.tick()
    assert record is not None
    assert record.refused is not None
    assert "mode" in record.refused
    assert len(await leader.services.plans.history()) == 1


async def test_a_pin_during_the_search_wins(leader: Controller) -> None:
    async def pin() -> None:
        await leader.services.pins.pin(PlanChange(pattern="disaggregated"), "me", "mine")

    leader.search.meanwhile = pin
    record = await leader.tick()
    plan = await leader.services.plans.current()
    assert record is not None
    assert record.refused is not None
    assert plan is not None
    assert (plan.pattern, plan.issued_by) == ("disaggregated", IssuedBy.OPERATOR)


async def test_an_operators_plan_during_the_search_is_not_written_over(leader: Controller) -> None:
    async def put() -> None:
        await leader.services.plans.issue(PlanChange(pattern="disaggregated"))

    leader.search.meanwhile = put
    record = await leader.tick()
    assert record is not None
    assert record.refused == "somebody has put plan 2 in force meanwhile"
    assert [plan.version for plan in await leader.services.plans.history()] == [2, 1]


async def test_a_leader_that_loses_the_lease_during_the_search_publishes_nothing(
    world: World, leader: Controller
) -> None:
    async def lose() -> None:
        world.now_s += 20
        assert await world.store.lease(KEYS.leader, "another", 10) is not None

    leader.search.meanwhile = lose
    record = await leader.tick()
    assert record is not None
    assert record.refused == "another controller leads by now"
    assert len(await leader.services.plans.history()) == 1
    assert await world.store.get(KEYS.study) is None
    assert await leader.loop.tick() is None


async def test_of_two_controllers_one_decides_and_the_other_knows_the_traffic_too(
    world: World, leader: Controller
) -> None:
    other = world.controller("b")
    first, second = await leader.tick(), await other.tick()
    assert first is not None
    assert second is None
    assert other.search.tasks == []
    assert leader.loop.observation is not None
    assert other.loop.observation is not None
    assert len(other.loop.observation.workload) == len(leader.loop.observation.workload) > 200


async def test_a_new_leader_goes_on_from_what_the_last_one_had_learnt(world: World, leader: Controller) -> None:
    await leader.tick()
    assert leader.loop._tuner is not None
    await world.goes_on(plan_version=2)  # the first no longer renews
    other = world.controller("b")
    assert await other.tick() is not None
    assert other.loop._tuner is not None
    assert other.loop._tuner._state.searches == leader.loop._tuner._state.searches + 1
    assert other.loop._tuner._state.winners


async def test_a_leader_that_was_replaced_for_a_while_goes_on_from_what_the_other_had_learnt(
    world: World, leader: Controller
) -> None:
    await leader.tick()
    await world.goes_on(plan_version=2)  # the first no longer renews
    other = world.controller("b")
    for _ in range(3):
        await other.tick()
        await world.goes_on(9, plan_version=2)
    assert other.loop._tuner is not None
    world.now_s += 10
    await world.beat((0, 1))
    assert await leader.tick() is not None
    assert leader.loop._tuner is not None
    assert leader.loop._tuner._state.searches >= other.loop._tuner._state.searches > 1


async def test_state_that_cannot_be_read_is_no_reason_not_to_lead(world: World) -> None:
    await world.store.compare_and_set(KEYS.study, b"nonsense", None)
    controller = world.controller()
    await controller.services.bootstrap()
    await world.goes_on(30)
    assert await controller.tick() is not None


async def test_too_little_traffic_is_waited_for(world: World) -> None:
    controller = world.controller()
    await controller.services.bootstrap()
    await world.goes_on(1)
    world.store._streams[KEYS.arrivals][:] = world.store._streams[KEYS.arrivals][:3]
    world.store._streams[KEYS.requests][:] = world.store._streams[KEYS.requests][:3]
    record = await controller.tick()
    assert record is not None
    assert record.reason is Reason.BOOTSTRAP
    assert controller.search.tasks == []


async def test_without_engines_nothing_is_searched_and_the_plan_stays(world: World, leader: Controller) -> None:
    world.now_s += 6
    record = await leader.tick()
    assert record is not None
    assert record.reason is Reason.NO_ENGINES
    assert leader.search.tasks == []


async def test_engines_that_die_lead_to_a_plan_for_those_that_are_left(world: World) -> None:
    controller = world.controller()
    await controller.services.bootstrap()
    await world.goes_on(30, engines=range(4))
    await controller.tick()
    await world.goes_on(10, engines=(2, 3), plan_version=2)
    record = await controller.tick()
    plan = await controller.services.plans.current()
    assert record is not None
    assert record.reason is Reason.FLEET_CHANGED
    assert plan is not None
    assert sorted(plan.roles) == ["e2", "e3"]
    assert sorted(plan.roles.values()) == [Role.DECODE, Role.PREFILL]


async def test_slos_that_change_are_searched_for_at_the_next_tick(world: World, leader: Controller) -> None:
    await leader.tick()
    await world.goes_on(plan_version=2)
    await leader.tick()
    searches = len(leader.search.tasks)
    await leader.services.slos.put("default", Slo(ttft_ms=100, tpot_ms=20))
    leader.search.best = lambda task: split(len(task.engines), 1, 0.3, explicit_knobs(task.engines))
    await world.goes_on(plan_version=2)
    record = await leader.tick()
    assert record is not None
    assert (record.reason, record.published_version) == (Reason.SLO_CHANGED, 3)
    assert len(leader.search.tasks) == searches + 1
    assert leader.search.tasks[-1].slos.classes["default"].ttft_ms == 100


async def test_a_search_that_fails_costs_one_tick(world: World, leader: Controller) -> None:
    leader.search.fails = True
    with pytest.raises(WorkerFailed):
        await leader.tick()
    leader.search.fails = False
    await world.goes_on()
    record = await leader.tick()
    assert record is not None
    assert record.published_version == 2


class TestWithoutTheStore:
    async def test_no_tick_decides_and_what_was_observed_is_kept(self, world: World, leader: Controller) -> None:
        await leader.tick()
        before = leader.loop.observation
        world.store.away = True
        await leader.loop._tick_whatever_happens()
        assert leader.loop.observation is before
        assert len(leader.search.tasks) == 1
        assert leader.metric("trimtab_store_up") == 0

    async def test_the_traffic_of_an_outage_that_is_reported_late_is_no_drop_in_load(
        self, world: World, leader: Controller
    ) -> None:
        await leader.tick()
        world.store.away = True
        world.now_s += 5
        await leader.loop._tick_whatever_happens()
        world.store.away = False
        world.now_s -= 5
        await world.goes_on(5, plan_version=2)  # what routers had kept
        await world.goes_on(20, plan_version=2)
        await leader.tick()
        assert leader.loop.observation is not None
        assert leader.loop.observation.workload.rate_rps == pytest.approx(10, rel=0.1)

    async def test_when_it_is_back_nothing_is_decided_until_everybody_has_had_time_to_report(
        self, world: World
    ) -> None:
        controller = world.controller(recovery_s=15)
        await controller.services.bootstrap()
        await world.goes_on(30)
        assert await controller.tick() is not None
        world.store.away = True
        await controller.loop._tick_whatever_happens()
        world.store.away = False
        world.now_s += 6  # heartbeats are gone
        assert await controller.tick() is None
        await world.goes_on(10, plan_version=2)
        assert await controller.tick() is None
        await world.goes_on(10, plan_version=2)
        record = await controller.tick()
        assert record is not None
        assert record.reason not in (Reason.NO_ENGINES, Reason.FLEET_CHANGED)

    async def test_one_that_came_back_empty_gets_the_last_documents_back_and_time_to_recover(
        self, world: World
    ) -> None:
        controller = world.controller(recovery_s=15)
        await controller.services.bootstrap()
        await controller.services.slos.put("chat", Slo(ttft_ms=300, tpot_ms=30))
        await world.goes_on(30)
        assert await controller.tick() is not None
        tuned = await controller.services.plans.current()
        world.store._documents.clear()
        world.store._streams.clear()
        world.store._heartbeats.clear()
        world.store._leases.clear()
        assert await controller.tick() is None
        await controller.services.bootstrap()
        restored = await controller.services.plans.current()
        assert tuned is not None
        assert restored is not None
        assert (restored.version, restored.pattern, restored.knobs, restored.roles) == (
            1, tuned.pattern, tuned.knobs, tuned.roles
        )  # fmt: skip
        assert "lost version 2" in restored.reason
        assert "chat" in (await controller.services.slos.current()).classes
        assert await controller.tick() is None
        await world.goes_on(20, plan_version=1)
        record = await controller.tick()
        assert record is not None
        assert record.reason not in (Reason.NO_ENGINES, Reason.FLEET_CHANGED, Reason.NO_TRAFFIC)
        assert controller.loop._tuner is not None
        assert controller.loop._tuner._state.searches == len(controller.search.tasks) > 1

    async def test_a_mode_that_was_set_outlives_the_loss_of_the_data(self, world: World, leader: Controller) -> None:
        await leader.services.modes.put(ModeChange(mode=Mode.PAUSED, by="me", reason="quiet"))
        world.store._documents.clear()
        await leader.services.bootstrap()
        mode = await leader.services.modes.current()
        assert (mode.version, mode.mode, mode.by, mode.reason) == (1, Mode.PAUSED, "me", "quiet")


class TestMetrics:
    async def test_a_leaders_tick_is_exported(self, leader: Controller) -> None:
        await leader.tick()
        record = (await leader.services.decisions.page(1)).decisions[0]
        assert leader.metric("trimtab_controller_leader") == 1
        assert leader.metric("trimtab_controller_leaderships_total") == 1
        assert leader.metric("trimtab_tuner_decisions_total", reason=record.reason.value) == 1
        assert leader.metric("trimtab_tuner_reason", reason=record.reason.value) == 1
        assert leader.metric("trimtab_tuner_mode", mode="auto") == 1
        assert leader.metric("trimtab_tuner_predicted_goodput_requests_per_second", of="best") == 10.0
        assert leader.metric("trimtab_tuner_promised_goodput_requests_per_second") == 10.0
        assert leader.metric("trimtab_tuner_trials_total") == 7
        assert leader.metric("trimtab_tuner_records_read_total", stream="requests") == 300
        assert leader.metric("trimtab_stored_plan_version") == 1

    async def test_whoever_does_not_lead_exports_nothing_of_the_tuner(self, world: World, leader: Controller) -> None:
        await leader.tick()
        world.now_s += 60
        assert leader.metric("trimtab_controller_leader") == 0
        assert leader.metric("trimtab_tuner_last_tick_timestamp_seconds") is None
        assert leader.metric("trimtab_tuner_predicted_goodput_requests_per_second", of="best") is None
        assert leader.metric("trimtab_tuner_records_read_total", stream="requests") == 300

    async def test_what_clients_got_and_how_far_the_prediction_was_off(self, world: World, leader: Controller) -> None:
        await leader.tick()
        for _ in range(6):
            await world.goes_on(plan_version=2)
            await leader.tick()
        assert leader.metric("trimtab_tuner_measured_goodput_requests_per_second") == pytest.approx(10, rel=0.1)
        assert leader.metric("trimtab_tuner_measured_attainment_ratio", slo_class="default") == 1
        assert leader.metric("trimtab_tuner_prediction_error_ratio") == pytest.approx(1.0)  # 5 were predicted


async def test_the_loop_ticks_until_it_is_cancelled_whatever_a_tick_raises(
    leader: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([StoreUnavailable("gone"), WorkerFailed("died"), RuntimeError("a bug")])
    ticks = asyncio.Event()

    async def tick() -> None:
        for error in failures:
            raise error
        ticks.set()

    monkeypatch.setattr(leader.loop, "tick", tick)
    monkeypatch.setattr(leader.loop, "_settings", replace(leader.loop._settings, tick_s=0.0))
    running = asyncio.create_task(leader.loop.run())
    async with asyncio.timeout(10):
        await ticks.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert leader.metric("trimtab_tuner_tick_failures_total") == 2
    assert leader.metric("trimtab_controller_store_errors_total") == 1
