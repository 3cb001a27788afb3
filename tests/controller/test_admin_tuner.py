"""The admin API's side of the tuner: mode, pins, decisions, explanations and what-if."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from controller import search_jobs
from controller.admin.app import create_app
from controller.admin.forecasts import Forecaster
from controller.admin.services import Services
from controller.controller_metrics import ControllerMetrics
from controller.decisions import DecisionLog, DecisionRecord, record_of
from controller.search_worker import WorkerFailed
from controller.store import Keys, MemoryStore, Store, open_store
from engines.emulated.profile import load_profile
from engines.types import Role
from tuner.candidates import data_parallel, explicit_knobs, split
from tuner.plan import BOOTSTRAP_PLAN
from tuner.search import what_if
from tuner.slo import BOOTSTRAP_SLOS
from tuner.twin.reference import simulate_reference
from tuner.twin.types import Cause, ClassForecast, Forecast
from tuner.types import Decision, EngineState, Measured, Mode, Observation, Prediction, Reason, SearchResult
from tuner.workload import Workload

MODEL = "test-model"
KEYS = Keys(MODEL)
TOKEN = "operator-token"
NOW_S = 1_700_000_000.0
KNOWN = ("balanced", "data_parallel", "disaggregated")
PROFILE = load_profile("laptop")


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Store]:
    made = open_store("memory://" if request.param == "memory" else redis_url)
    yield made
    await made.aclose()


@pytest.fixture
async def services(store: Store) -> Services:
    made = Services.wire(store, MODEL, now_s=lambda: NOW_S, known=lambda: KNOWN)
    await made.bootstrap()
    return made


def client_of(services: Services, **given: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(services, SecretStr(TOKEN), **given))
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers)


@pytest.fixture
async def api(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(services) as client:
        yield client


async def answer_of(api: httpx.AsyncClient, method: str, path: str, body: object = None) -> dict[str, Any]:
    answer = await api.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


class TestMode:
    async def test_a_stack_starts_with_auto(self, api: httpx.AsyncClient) -> None:
        mode = await answer_of(api, "GET", "/v1/mode")
        assert (mode["version"], mode["mode"], mode["by"]) == (1, "auto", "bootstrap")

    @pytest.mark.parametrize("mode", list(Mode))
    async def test_a_mode_that_was_put_says_who_when_and_why(self, api: httpx.AsyncClient, mode: Mode) -> None:
        body = {"mode": mode, "by": "me", "reason": "because"}
        put = await answer_of(api, "PUT", "/v1/mode", body)
        assert put == body | {"version": 2, "at_s": NOW_S}
        assert await answer_of(api, "GET", "/v1/mode") == put

    async def test_only_one_of_two_that_expect_the_same_version_sets_it(self, api: httpx.AsyncClient) -> None:
        await answer_of(api, "PUT", "/v1/mode", {"mode": "paused", "expected_version": 1})
        late = await api.put("/v1/mode", json={"mode": "auto", "expected_version": 1})
        assert late.status_code == 409
        assert late.json()["actual_version"] == 2

    async def test_an_unknown_mode_is_refused_with_the_known_ones(self, api: httpx.AsyncClient) -> None:
        answer = await api.put("/v1/mode", json={"mode": "fast"})
        assert answer.status_code == 422
        assert "advisory" in answer.json()["detail"]


class TestPins:
    async def test_pinning_a_plan_puts_it_in_force_and_stops_the_tuner(self, api: httpx.AsyncClient) -> None:
        body = {"plan": {"pattern": "disaggregated", "reason": "mine"}, "by": "me", "reason": "load test"}
        pinned = await answer_of(api, "POST", "/v1/plan/pin", body)
        assert (pinned["plan"]["pattern"], pinned["plan"]["issued_by"]) == ("disaggregated", "operator")
        assert (pinned["mode"]["mode"], pinned["mode"]["by"], pinned["mode"]["reason"]) == ("manual", "me", "load test")
        assert (await answer_of(api, "GET", "/v1/mode"))["mode"] == "manual"
        assert (await answer_of(api, "GET", "/v1/plan"))["version"] == 2

    async def test_pinning_an_earlier_version_puts_that_in_force_again(self, api: httpx.AsyncClient) -> None:
        await answer_of(api, "PUT", "/v1/plan", {"pattern": "disaggregated"})
        pinned = await answer_of(api, "POST", "/v1/plan/pin", {"version": 1})
        assert (pinned["plan"]["version"], pinned["plan"]["pattern"]) == (3, "data_parallel")

    async def test_pinning_nothing_in_particular_keeps_what_is_in_force(self, api: httpx.AsyncClient) -> None:
        pinned = await answer_of(api, "POST", "/v1/plan/pin", {})
        assert (pinned["plan"]["version"], pinned["mode"]["mode"]) == (1, "manual")

    async def test_unpinning_gives_the_plan_back_to_the_tuner_as_it_is(self, api: httpx.AsyncClient) -> None:
        await answer_of(api, "POST", "/v1/plan/pin", {"plan": {"pattern": "disaggregated"}})
        mode = await answer_of(api, "POST", "/v1/plan/unpin", {"reason": "done"})
        assert (mode["mode"], mode["reason"]) == ("auto", "done")
        assert (await answer_of(api, "GET", "/v1/plan"))["pattern"] == "disaggregated"

    @pytest.mark.parametrize(
        ("body", "status", "says"),
        [
            ({"plan": {"pattern": "balanced"}}, 422, "offload_ratio"),
            ({"plan": {"pattern": "magic"}}, 422, "'magic'"),
            ({"version": 99}, 404, "no plan of version 99"),
            ({"version": 1, "plan": {"pattern": "disaggregated"}}, 422, "give one of them"),
        ],
    )
    async def test_a_pin_that_cannot_be_leaves_the_mode_as_it_was(
        self, api: httpx.AsyncClient, body: object, status: int, says: str
    ) -> None:
        answer = await api.post("/v1/plan/pin", json=body)
        assert answer.status_code == status
        assert says in answer.json()["detail"]
        assert (await answer_of(api, "GET", "/v1/mode"))["mode"] == "auto"

    async def test_a_plan_that_is_put_while_the_tuner_moves_plans_comes_with_a_warning(
        self, api: httpx.AsyncClient
    ) -> None:
        issued = await answer_of(api, "PUT", "/v1/plan", {"pattern": "disaggregated"})
        assert any("pin it" in warning for warning in issued["warnings"])
        await answer_of(api, "PUT", "/v1/mode", {"mode": "manual"})
        assert (await answer_of(api, "PUT", "/v1/plan", {"pattern": "disaggregated"}))["warnings"] == []


def engine(engine_id: str) -> EngineState:
    return EngineState(engine_id, "laptop", PROFILE)


ENGINES = [engine(f"e{number}") for number in range(3)]
STATIC = data_parallel(3, explicit_knobs(ENGINES))
SPLIT = split(3, 1, 0.1, explicit_knobs(ENGINES))


def prediction(candidate: Any, goodput_rps: float) -> Prediction:
    classes = {"default": ClassForecast(100, goodput_rps / 10, (0.1, 0.2, 0.3), (0.01, 0.02, 0.03))}
    forecast = Forecast(
        10.0, goodput_rps, goodput_rps, 0.0, classes, {"mixed": 0.5}, {Cause.QUEUE: 30, Cause.DECODE: 2}
    )
    return Prediction(candidate, forecast, goodput_rps, 10.0, 0.0, goodput_rps, goodput_rps - 7.0, 0.1)


def searched() -> Decision:
    best, incumbent = prediction(SPLIT, 9.0), prediction(STATIC, 7.0)
    measured = Measured(60.0, 600, 10.0, 6.5, {"default": 0.65}, {Cause.PREFILL: 200, Cause.QUEUE: 10}, 1)
    result = SearchResult([best, incumbent], incumbent, incumbent, trials=42, seconds=1.5)
    return Decision(Reason.BETTER_PLAN, "balanced is better", SPLIT, None, best, result, measured)


def kept(decision: Decision, at_s: float = NOW_S, **given: Any) -> DecisionRecord:
    said = {"controller_id": "c", "mode": Mode.AUTO, "plan_version": 1, "tick_s": 2.0} | given
    return record_of(decision, at_s=at_s, **said)


class TestDecisions:
    async def test_nothing_decided_yet_is_an_empty_page(self, api: httpx.AsyncClient) -> None:
        assert await answer_of(api, "GET", "/v1/decisions") == {"decisions": [], "before": None}

    async def test_pages_go_back_to_the_first_and_miss_nothing(
        self, services: Services, api: httpx.AsyncClient
    ) -> None:
        for number in range(7):
            await services.decisions.write(kept(searched(), at_s=NOW_S + number))
        seen, path = [], "/v1/decisions?count=3"
        while True:
            page = await answer_of(api, "GET", path)
            seen.append([each["at_s"] - NOW_S for each in page["decisions"]])
            if page["before"] is None:
                break
            path = f"/v1/decisions?count=3&before={page['before']}"
        assert seen == [[6, 5, 4], [3, 2, 1], [0]]

    async def test_a_decision_comes_with_its_evidence(self, services: Services, api: httpx.AsyncClient) -> None:
        await services.decisions.write(kept(searched(), published_version=2))
        (found,) = (await answer_of(api, "GET", "/v1/decisions"))["decisions"]
        assert (found["reason"], found["sentence"]) == ("better_plan", "balanced is better")
        assert (found["plan_version"], found["published_version"]) == (1, 2)
        assert found["chosen"]["pattern"] == "balanced"
        assert [each["goodput_rps"] for each in found["search"]["ranked"]] == [9.0, 7.0]
        assert found["search"]["incumbent"]["forecast"]["classes"]["default"]["attainment"] == 0.7
        assert found["measured"]["causes"] == {"prefill": 200, "queue": 10}

    async def test_what_another_version_wrote_is_left_out(self, services: Services, api: httpx.AsyncClient) -> None:
        await services.decisions.write(kept(searched()))
        await services.store.append(KEYS.decisions, [b'{"reason": "vibes"}', b"{"], 10)
        assert len((await answer_of(api, "GET", "/v1/decisions"))["decisions"]) == 1

    @pytest.mark.parametrize("query", ["count=0", "count=1000", "before=yesterday", "before=-1"])
    async def test_a_page_that_cannot_be_is_refused(self, api: httpx.AsyncClient, query: str) -> None:
        answer = await api.get(f"/v1/decisions?{query}")
        assert answer.status_code == 422
        assert query.partition("=")[0] in answer.json()["detail"]

    async def test_ticks_that_say_nothing_new_are_kept_once_a_minute(self, store: Store) -> None:
        log = DecisionLog(store, KEYS.decisions)
        steady = Decision(Reason.STEADY, "nothing moved")
        for second in range(0, 121, 10):
            await log.write(kept(steady, at_s=NOW_S + second))
        await log.write(kept(Decision(Reason.NO_TRAFFIC, "nothing arrives"), at_s=NOW_S + 121))
        await log.write(kept(steady, at_s=NOW_S + 122))
        await log.write(kept(steady, at_s=NOW_S + 123, plan_version=2))
        await log.write(kept(searched(), at_s=NOW_S + 124))
        await log.write(kept(searched(), at_s=NOW_S + 125))
        times = [round(each.at_s - NOW_S) for each in (await log.page(20)).decisions]
        assert times == [125, 124, 123, 122, 121, 120, 60, 0]


class TestExplain:
    async def test_before_any_decision_it_says_so(self, api: httpx.AsyncClient) -> None:
        found = await answer_of(api, "GET", "/v1/explain")
        assert "decided nothing yet" in " ".join(found["sentences"])
        assert found["search"] is None

    async def test_it_says_what_clients_got_why_not_more_and_what_was_tried(
        self, services: Services, api: httpx.AsyncClient
    ) -> None:
        await services.decisions.write(kept(searched(), published_version=1))
        await services.decisions.write(kept(Decision(Reason.STEADY, "nothing moved"), at_s=NOW_S + 10))
        found = await answer_of(api, "GET", "/v1/explain")
        said = " ".join(found["sentences"])
        assert "6.50 of 10.00 requests/s" in said
        assert "prefill (200), queue (10)" in said
        assert "Of 42 plans tried" in said
        assert "balanced 0.1 on 1 prefill / 2 decode engines" in said
        assert found["violations"] == {
            "measured": {"prefill": 200, "queue": 10},
            "predicted": {"queue": 30, "decode": 2},
        }
        assert (found["last"]["reason"], found["search"]["reason"]) == ("steady", "better_plan")
        assert found["issued"]["published_version"] == found["plan"]["version"] == 1


class InlineWorker:
    """Forecasts are made here, now, by the simulator that needs no compiling."""

    async def run(self, _limit_s: float, job: object, *args: Any) -> list[Forecast]:
        assert job is search_jobs.what_if
        return what_if(*args, run=simulate_reference)


class BrokenWorker:
    async def run(self, *_: Any) -> Any:
        raise WorkerFailed("the search worker died in what_if")


@dataclass
class Knows:
    observation: Observation | None
    worker: Any


def traffic(count: int = 300) -> Workload:
    """Ten a second."""
    zeros = np.zeros(count, dtype=np.int64)
    return Workload(
        span_s=max(1.0, count / 10),
        classes=("default",),
        arrived_s=np.arange(count) / 10,
        prompt_tokens=zeros + 600,
        output_tokens=zeros + 60,
        slo_class=zeros,
        session=np.arange(count),
        root=zeros,
        root_tokens=zeros,
    )


def observed(workload: Workload | None = None, engines: Sequence[EngineState] = ENGINES) -> Observation:
    return Observation(
        NOW_S, engines, BOOTSTRAP_SLOS, BOOTSTRAP_PLAN, traffic() if workload is None else workload, measured=None
    )


class TestWhatIf:
    @pytest.fixture
    async def services(self) -> AsyncIterator[Services]:
        store = MemoryStore()
        yield Services.wire(store, MODEL, now_s=lambda: NOW_S, known=lambda: KNOWN)
        await store.aclose()

    @pytest.fixture
    async def predict(self, services: Services) -> AsyncIterator[httpx.AsyncClient]:
        async with client_of(
            services, forecaster=Forecaster(Knows(observed(), InlineWorker()), services.plans.check)
        ) as client:
            yield client

    async def test_the_plan_in_force_is_predicted_on_the_observed_traffic(self, predict: httpx.AsyncClient) -> None:
        found = await answer_of(predict, "POST", "/v1/what-if", {})
        assert found["variants"] == []
        assert found["traffic"] == {
            "until_s": NOW_S,
            "span_s": 30.0,
            "requests": 300,
            "rate_rps": 10.0,
            "mean_prompt_tokens": 600.0,
            "mean_output_tokens": 60.0,
        }
        assert found["in_force"]["plan"]["pattern"] == "data_parallel"
        assert 0 < found["in_force"]["forecast"]["goodput_rps"] <= found["in_force"]["forecast"]["offered_rps"]

    async def test_a_sweep_predicts_one_plan_for_each_ratio(self, predict: httpx.AsyncClient) -> None:
        body = {"offload_ratios": [0, 0.1, 0.3], "prefill_engines": 1}
        found = await answer_of(predict, "POST", "/v1/what-if", body)
        plans = [each["plan"] for each in found["variants"]]
        assert [plan["pattern"] for plan in plans] == ["disaggregated", "balanced", "balanced"]
        assert [plan["knobs"]["offload_ratio"] for plan in plans] == [0, 0.1, 0.3]
        assert all(sorted(plan["roles"].values()) == ["decode", "decode", "prefill"] for plan in plans)
        assert len({str(each["forecast"]) for each in found["variants"]}) == 3

    async def test_a_change_leaves_everything_else_as_it_is(self, predict: httpx.AsyncClient) -> None:
        body = {"knobs": {"policy": "round_robin", "max_attempts": "5"}}
        (variant,) = (await answer_of(predict, "POST", "/v1/what-if", body))["variants"]
        assert (variant["plan"]["pattern"], variant["plan"]["roles"]) == ("data_parallel", {})
        assert (variant["plan"]["knobs"]["policy"], variant["plan"]["knobs"]["max_attempts"]) == ("round_robin", 5)

    async def test_tighter_slos_cost_goodput_in_the_forecast_only(
        self, services: Services, predict: httpx.AsyncClient
    ) -> None:
        tight = {"ttft_ms": 1, "tpot_ms": 1}
        found = await answer_of(predict, "POST", "/v1/what-if", {"slos": {"default": tight}})
        assert found["slos"]["classes"]["default"]["ttft_ms"] == 1
        assert found["variants"][0]["forecast"]["goodput_rps"] == 0 < found["in_force"]["forecast"]["goodput_rps"]
        assert (await services.slos.current()) == BOOTSTRAP_SLOS
        assert await services.plans.current() is None

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            ({"pattern": "balanced"}, "offload_ratio"),
            ({"pattern": "magic"}, "'magic'"),
            ({"knobs": {"speed": 9}}, "speed"),
            ({"offload_ratios": [1.5]}, "offload_ratios"),
            ({"prefill_engines": 3, "pattern": "disaggregated"}, "leave none to decode"),
            ({"prefill_engines": 1}, "data_parallel"),
            ({"prefill_engines": 1, "roles": {"e0": "prefill"}}, "give one of them"),
            ({"roles": {"e0": "chef"}}, "roles.e0"),
            ({"slos": {"default": {"ttft_ms": -1, "tpot_ms": 1}}}, "ttft_ms"),
        ],
    )
    async def test_what_makes_no_plan_is_refused_with_a_sentence(
        self, predict: httpx.AsyncClient, body: object, says: str
    ) -> None:
        answer = await predict.post("/v1/what-if", json=body)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        assert says in answer.json()["detail"]

    @pytest.mark.parametrize(
        ("observation", "says"),
        [
            (None, "next tick"),
            (observed(engines=[]), "no engine"),
            (observed(engines=[EngineState("e0", "laptop", PROFILE, draining=True)]), "no engine"),
            (observed(traffic(0)), "no request has arrived"),
        ],
    )
    async def test_without_anything_to_predict_from_it_says_what_is_lacking(
        self, services: Services, observation: Observation | None, says: str
    ) -> None:
        forecaster = Forecaster(Knows(observation, InlineWorker()), services.plans.check)
        async with client_of(services, forecaster=forecaster) as client:
            answer = await client.post("/v1/what-if", json={})
        assert answer.status_code == 409
        assert says in answer.json()["detail"]

    async def test_a_worker_that_died_and_a_controller_that_does_not_tune_are_problems(
        self, services: Services
    ) -> None:
        broken = Forecaster(Knows(observed(), BrokenWorker()), services.plans.check)
        for forecaster, status, says in ((broken, 503, "died"), (None, 409, "does not tune")):
            async with client_of(services, forecaster=forecaster) as client:
                answer = await client.post("/v1/what-if", json={})
            assert answer.status_code == status
            assert says in answer.json()["detail"]


async def test_metrics_need_no_token(services: Services) -> None:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    async with client_of(services, registry=registry) as client:
        del client.headers["authorization"]
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert "trimtab_controller_leader 0.0" in answer.text


async def test_roles_by_engine_count_keep_engines_where_they_are() -> None:
    plan = BOOTSTRAP_PLAN.model_copy(update={"pattern": "disaggregated", "roles": {"e2": Role.PREFILL}})
    observation = Observation(NOW_S, ENGINES, BOOTSTRAP_SLOS, plan, traffic(), measured=None)
    store = MemoryStore()
    services = Services.wire(store, MODEL, known=lambda: KNOWN)
    async with client_of(
        services, forecaster=Forecaster(Knows(observation, InlineWorker()), services.plans.check)
    ) as client:
        found = await answer_of(client, "POST", "/v1/what-if", {"prefill_engines": 1})
    assert found["variants"][0]["plan"]["roles"]["e2"] == "prefill"
    await store.aclose()
