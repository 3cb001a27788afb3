"""The tuner over real processes: controllers, engines, a router, Redis and clients that do not stop asking."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controller.stack.embedded import EmbeddedRedis, embedded_redis
from tests.support.controllers import DECIDED_S, StartController, busy, controller_processes
from tests.support.fleet import StartFleet, until

pytestmark = pytest.mark.timeout(400)  # the twin may have to be compiled on a busy machine


@pytest.fixture
async def start_controller(tmp_path: Path) -> AsyncIterator[StartController]:
    async with controller_processes(tmp_path) as start:
        yield start


def engines_of(candidate: dict[str, Any]) -> int:
    return sum(candidate[f"{role}_engines"] for role in ("prefill", "decode", "mixed"))


async def test_of_two_controllers_one_leads_and_when_it_is_killed_the_other_takes_over(
    redis_url: str, start_controller: StartController
) -> None:
    first = await start_controller("first", redis_url)
    await until(first.leads, "the first leads", DECIDED_S)
    second = await start_controller("second", redis_url)
    await first.decided(lambda each: each["controller_id"] == "first", "the leader decides")
    assert not await second.leads()
    assert await second.decisions(), "whoever does not lead shows what was decided too"
    helpers = first.children()
    assert helpers

    await first.kill()
    await until(second.leads, "the second leads", DECIDED_S)
    await second.decided(lambda each: each["controller_id"] == "second", "the new leader decides")
    await until(lambda: not any(helper.is_running() for helper in helpers), "nothing of the first is left")


async def test_a_leader_that_is_stopped_in_order_is_replaced_and_leaves_nothing(
    redis_url: str, start_controller: StartController
) -> None:
    first = await start_controller("first", redis_url, lease_s=600)
    await until(first.leads, "the first leads", DECIDED_S)
    helpers = first.children()
    first.process.terminate()
    assert await first.process.wait() == 0
    assert not any(helper.is_running() for helper in helpers)
    second = await start_controller("second", redis_url, lease_s=600)
    await until(second.leads, "the second leads though the lease would have lasted ten minutes", DECIDED_S)


async def test_slos_that_are_halved_through_the_api_change_the_plan_or_it_says_why_not(
    redis_url: str, start_fleet: StartFleet, start_controller: StartController
) -> None:
    fleet = await start_fleet(2, engine={"redis_url": redis_url})
    controller = await start_controller("only", redis_url)
    async with busy(fleet.http) as clients:
        await controller.decided(lambda each: each["search"] is not None, "a search")
        table = await controller.get("/v1/slo")
        slo = table["classes"]["default"]
        halved = slo | {"ttft_ms": slo["ttft_ms"] / 2, "tpot_ms": slo["tpot_ms"] / 2}
        answer = await controller.http.put("/v1/slo/default", json=halved)
        changed_s = (await controller.decisions())[0]["at_s"]
        assert answer.json()["version"] == table["version"] + 1

        decision = await controller.decided(
            lambda each: each["at_s"] > changed_s and each["search"] is not None, "a search after the change"
        )
        assert decision["published_version"] is not None or decision["sentence"]
        explained = await controller.get("/v1/explain")
        assert explained["search"]["at_s"] >= decision["at_s"]
        assert any("plans tried" in sentence for sentence in explained["sentences"])

        predicted = await controller.http.post("/v1/what-if", json={"offload_ratios": [0, 0.2], "prefill_engines": 1})
        assert predicted.status_code == 200, predicted.text
        assert len(predicted.json()["variants"]) == 2
    assert clients.wrong == []


async def test_half_the_engines_die_and_clients_hardly_notice(
    redis_url: str, start_fleet: StartFleet, start_controller: StartController
) -> None:
    fleet = await start_fleet(4, engine={"redis_url": redis_url})
    controller = await start_controller("only", redis_url)
    roles = {"e0": "prefill", "e1": "prefill", "e2": "decode", "e3": "decode"}
    put = await controller.http.put("/v1/plan", json={"pattern": "disaggregated", "roles": roles})
    assert put.status_code == 200
    async with busy(fleet.http) as clients:
        await controller.decided(lambda each: each["search"] is not None, "a search")
        for engine_id in ("e0", "e2"):
            await fleet.engines[engine_id].kill()
        died_s = (await controller.decisions())[0]["at_s"]
        decision = await controller.decided(
            lambda each: (
                each["at_s"] > died_s
                and each["search"] is not None
                and engines_of(each["search"]["incumbent"]["candidate"]) == 2
            ),
            "a search over the engines that are left",
        )
        assert all(engines_of(each["candidate"]) == 2 for each in decision["search"]["ranked"])
        answered = clients.answered
        await until(lambda: clients.answered > answered + 20, "clients are served", 60)
        plan = await controller.get("/v1/plan")
        if plan["issued_by"] == "tuner":
            assert set(plan["roles"]) == {"e1", "e3"}
    assert clients.wrong == []


async def test_roles_that_change_under_load_drop_nothing(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(3)
    async with busy(fleet.http) as clients:
        clients.every_s = 0.05
        for turn in range(9):
            roles = {f"e{number}": "prefill" if number == turn % 3 else "decode" for number in range(3)}
            await fleet.plan("disaggregated" if turn % 2 else "data_parallel", roles)
            answered = clients.answered
            await until(lambda least=answered + 5: clients.answered > least, "clients are served", 60)
    assert clients.wrong == []
    await fleet.settled()


@pytest.fixture
async def own_redis() -> AsyncIterator[EmbeddedRedis]:
    """To be killed. Name it before the fleet, which is then gone before it."""
    async with embedded_redis() as server:
        yield server


async def test_redis_dies_and_comes_back_empty_and_routers_and_clients_go_on(
    own_redis: EmbeddedRedis, start_fleet: StartFleet, start_controller: StartController
) -> None:
    fleet = await start_fleet(2, engine={"redis_url": own_redis.url}, router={"redis_url": own_redis.url})
    controller = await start_controller("only", own_redis.url)
    roles = {"e0": "prefill", "e1": "decode"}
    pin = {"plan": {"pattern": "disaggregated", "roles": roles, "reason": "mine"}}
    assert (await controller.http.post("/v1/plan/pin", json=pin)).status_code == 200
    async with busy(fleet.http) as clients:
        await controller.decided(lambda each: each["search"] is not None, "a search")
        await own_redis.kill()
        answered = clients.answered
        await until(lambda: clients.answered > answered + 10, "clients are served without Redis", 60)
        assert (await controller.http.get("/v1/plan")).status_code == 503

        await own_redis.start()

        async def is_back() -> bool:
            return (await controller.http.get("/v1/plan")).status_code == 200

        await until(is_back, "there is a plan again", 60)
        plan = await controller.get("/v1/plan")
        assert (plan["version"], plan["issued_by"], plan["pattern"]) == (1, "operator", "disaggregated")
        assert plan["roles"] == roles
        assert (await controller.get("/v1/mode"))["mode"] == "manual"
        decision = await controller.decided(lambda each: each["search"] is not None, "a search over what is back")
        assert decision["reason"] == "pinned"
        assert engines_of(decision["search"]["incumbent"]["candidate"]) == 2
        assert not [each for each in await controller.decisions() if "no engine" in each["sentence"]]
    assert clients.wrong == []
