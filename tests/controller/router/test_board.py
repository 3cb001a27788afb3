import asyncio

import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import RouterMetrics
from controller.router.board import Board
from controller.router.patterns import load_patterns
from controller.store import Keys, MemoryStore
from tuner.plan import BOOTSTRAP_PLAN, Plan

LIVENESS_S = 20.0


@pytest.fixture
def board() -> Board:
    return Board(load_patterns(), RouterMetrics(CollectorRegistry()))


def plan(version: int) -> Plan:
    return BOOTSTRAP_PLAN.model_copy(update={"version": version})


async def test_a_plan_applied_while_nobody_waits_is_news_to_the_next_who_does(board: Board) -> None:
    await board.changed(0.0)
    board.apply_plan(plan(7))
    async with asyncio.timeout(LIVENESS_S):
        await board.changed(1000.0)


async def test_what_has_been_told_is_no_news_again(board: Board) -> None:
    board.apply_plan(plan(7))
    await board.changed(1000.0)
    waiting = asyncio.create_task(board.changed(1000.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()


async def test_a_plan_that_cannot_be_read_leaves_the_old_one_and_the_next_one_is_applied(board: Board) -> None:
    store, keys = MemoryStore(), Keys("m")
    following = asyncio.create_task(board.follow(store, keys))
    await store.compare_and_set(keys.plan, b"no plan", None)
    await asyncio.sleep(0.05)
    assert board.plan == BOOTSTRAP_PLAN
    await store.compare_and_set(keys.plan, plan(2).model_dump_json().encode(), 1)
    async with asyncio.timeout(LIVENESS_S):
        while board.plan.version != 2:
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
