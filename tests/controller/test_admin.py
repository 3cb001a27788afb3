"""The admin API and the services behind it, over the in-memory store and, for the HTTP edge, over a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec
import pytest
from pydantic import SecretStr

from controller.admin.app import create_app
from controller.admin.migrations import MigrationRequest
from controller.admin.patterns import installed_patterns
from controller.admin.plans import PlanChange, PlanService, UnknownPattern, UnknownVersion
from controller.admin.process import run
from controller.admin.services import Services
from controller.admin.slos import SloService
from controller.heartbeats import RouterBeat
from controller.settings import AdminSettings, BadSettings
from controller.store import Keys, MemoryStore, Store, StoreUnavailable, VersionConflict, open_store
from engines.client import EngineClient, Prompt
from engines.errors import EngineUnreachable, NoKvRoom, TransferFailed
from engines.protocol import Config, PrepRecvAnswer, RemoteSendAnswer
from engines.telemetry import Heartbeat
from engines.types import EngineInfo, EngineLoad, KvLayout, Role
from tests.support.fleet import until
from tuner.plan import BadDocument, HotPrefix, IssuedBy, Knobs, parse
from tuner.plan import Plan as PlanDocument

MODEL = "test-model"
KEYS = Keys(MODEL)
TOKEN = "operator-token"
NOW_S = 1_700_000_000.0
KNOWN = ("balanced", "data_parallel", "disaggregated")
LAYOUT = KvLayout(model=MODEL, dtype="bfloat16", layers=2, kv_heads=2, head_dim=8)


@dataclass
class FakeEngine:
    """Records the verbs it is called with and answers as told; `fails` is raised by the verb of that name."""

    matched: int = 0
    fails: dict[str, Exception] = field(default_factory=dict)
    calls: list[tuple[str, object]] = field(default_factory=list)

    def _call(self, verb: str, value: object) -> None:
        self.calls.append((verb, value))
        if verb in self.fails:
            raise self.fails[verb]

    async def drain(self, on: bool) -> None:
        self._call("drain", on)

    async def config(self, config: Config) -> Config:
        self._call("config", config)
        return config

    async def prep_recv(
        self, request_id: str, prompt: Prompt, end: int, ttl_s: float, trace: object = None
    ) -> PrepRecvAnswer:
        self._call("prep_recv", (prompt.tokens, end))
        return PrepRecvAnswer(kv_addr_info="room", prefix_matched_length=self.matched)

    async def remote_send(
        self, request_id: str, prompt: Prompt, kv_addr_info: str, begin: int, end: int, trace: object = None
    ) -> RemoteSendAnswer:
        self._call("remote_send", (kv_addr_info, begin, end))
        return RemoteSendAnswer(cached_length=0, bytes=640, prefill_s=0.1, transfer_s=0.2)

    async def abort(self, request_id: str, trace: object = None) -> None:
        self._call("abort", None)

    async def aclose(self) -> None:
        self.calls.append(("aclose", None))

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]

    def configs(self) -> list[object]:
        return [value for verb, value in self.calls if verb == "config"]


@dataclass
class World:
    """A store, the services over it, and engines that can be made to live and die."""

    store: Store
    services: Services
    engines: dict[str, FakeEngine]

    async def join(self, engine_id: str, epoch: str = "1", **how: object) -> FakeEngine:
        self.engines[f"http://{engine_id}"] = FakeEngine(**how)  # type: ignore[arg-type]
        await self.announce(engine_id, f"http://{engine_id}", epoch)
        return self.engines[f"http://{engine_id}"]

    async def announce(self, engine_id: str, url: str, epoch: str = "1") -> None:
        info = EngineInfo(
            engine_id=engine_id,
            url=url,
            kind="test",
            model=MODEL,
            context_length_tokens=1000,
            kv_capacity_tokens=1000,
            kv_layout=LAYOUT,
            transports=("tcp",),
            epoch=epoch,
        )
        await self.store.heartbeat(
            KEYS.engine(engine_id), msgspec.json.encode(Heartbeat(info=info, load=EngineLoad())), 60
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    engines: dict[str, FakeEngine] = {}

    def connect(url: str) -> EngineClient:
        return engines[url] if url in engines else EngineClient(url)  # type: ignore[return-value]

    store = MemoryStore()
    services = Services.wire(store, MODEL, now_s=lambda: NOW_S, known=lambda: KNOWN, connect=connect)
    yield World(store, services, engines)
    await store.aclose()


@pytest.fixture
async def plans(world: World) -> PlanService:
    await world.services.bootstrap()
    return world.services.plans


@pytest.fixture
async def api(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The whole API over a real Redis, as the holder of the token sees it."""
    store = open_store(redis_url)
    services = Services.wire(store, MODEL)
    await services.bootstrap()
    transport = httpx.ASGITransport(create_app(services, SecretStr(TOKEN)))
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
        yield client
    await store.aclose()


class TestPlans:
    async def test_bootstrap_issues_version_1_once(self, plans: PlanService) -> None:
        first = await plans.current()
        await plans.bootstrap()
        assert first is not None
        assert (first.version, first.issued_by, first.pattern) == (1, IssuedBy.BOOTSTRAP, "data_parallel")
        assert await plans.current() == first

    async def test_the_version_in_the_document_is_the_stores_own(self, world: World, plans: PlanService) -> None:
        await plans.issue(PlanChange(pattern="disaggregated"))
        found = await world.store.get(KEYS.plan)
        assert found is not None
        assert parse(PlanDocument, found.value).version == found.version == 2

    async def test_an_issued_plan_says_who_when_and_why(self, plans: PlanService) -> None:
        plan = await plans.issue(PlanChange(pattern="disaggregated", reason="long prompts"))
        assert (plan.issued_by, plan.issued_at_s, plan.reason) == (IssuedBy.OPERATOR, NOW_S, "long prompts")

    async def test_a_plan_that_contradicts_itself_is_refused_whole(self, plans: PlanService) -> None:
        with pytest.raises(BadDocument, match="0 < offload_ratio < 1"):
            await plans.issue(PlanChange(pattern="balanced"))
        current = await plans.current()
        assert current is not None
        assert current.version == 1

    async def test_an_unknown_pattern_is_refused_with_the_known_ones(self, plans: PlanService) -> None:
        with pytest.raises(UnknownPattern, match=r"'magic'.*balanced, data_parallel, disaggregated"):
            await plans.issue(PlanChange(pattern="magic"))

    async def test_an_expected_version_that_is_not_in_force_conflicts(self, plans: PlanService) -> None:
        with pytest.raises(VersionConflict) as conflict:
            await plans.issue(PlanChange(pattern="disaggregated"), expected_version=7)
        assert conflict.value.actual == 1

    async def test_concurrent_writers_all_win_with_versions_of_their_own(self, plans: PlanService) -> None:
        issued = await asyncio.gather(*(plans.issue(PlanChange(pattern="disaggregated")) for _ in range(8)))
        assert sorted(plan.version for plan in issued) == list(range(2, 10))

    async def test_history_is_newest_first_and_bounded(self, plans: PlanService) -> None:
        for number in range(3):
            await plans.issue(PlanChange(pattern="disaggregated", reason=f"number {number}"))
        assert [plan.version for plan in await plans.history()] == [4, 3, 2, 1]
        assert [plan.version for plan in await plans.history(2)] == [4, 3]

    async def test_rollback_issues_the_old_content_as_a_new_version(self, plans: PlanService) -> None:
        roles = {"e0": Role.PREFILL, "e1": Role.DECODE}
        hot = (HotPrefix(prefix=f"{7:016x}", blocks=8, engines=("e1",)),)
        change = PlanChange(pattern="balanced", knobs=Knobs(offload_ratio=0.2), roles=roles, replicas=hot)
        old = await plans.issue(change)
        await plans.issue(PlanChange(pattern="data_parallel"))
        back = await plans.rollback(old.version)
        assert (back.version, back.pattern, back.knobs, back.roles) == (4, old.pattern, old.knobs, old.roles)
        assert back.replicas == hot
        assert "rolled back to version 2" in back.reason

    async def test_rollback_to_a_version_that_is_not_kept_names_those_that_are(self, plans: PlanService) -> None:
        with pytest.raises(UnknownVersion, match="kept are 1 to 1"):
            await plans.rollback(99)

    async def test_a_plan_stands_even_if_the_history_cannot_be_written(
        self, world: World, plans: PlanService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def away(*_: object) -> None:
            raise StoreUnavailable("gone")

        monkeypatch.setattr(world.store, "append", away)
        plan = await plans.issue(PlanChange(pattern="disaggregated"))
        assert await plans.current() == plan
        assert [kept.version for kept in await plans.history()] == [2, 1]

    async def test_an_unreadable_plan_can_be_written_over(self, world: World) -> None:
        await world.store.compare_and_set(KEYS.plan, b"not a plan", None)
        with pytest.raises(BadDocument):
            await world.services.plans.current()
        plan = await world.services.plans.issue(PlanChange(pattern="disaggregated"))
        assert plan.version == 2

    def test_built_in_patterns_are_installed(self) -> None:
        assert set(KNOWN) <= set(installed_patterns())


class TestSlos:
    @pytest.fixture
    async def slos(self, world: World) -> SloService:
        await world.services.bootstrap()
        return world.services.slos

    async def test_putting_one_class_leaves_the_others(self, slos: SloService) -> None:
        before = await slos.current()
        table = await slos.put("chat", before.classes["default"].model_copy(update={"ttft_ms": 300.0}))
        assert (table.version, sorted(table.classes)) == (2, ["chat", "default"])
        assert table.classes["default"] == before.classes["default"]

    async def test_default_cannot_be_removed(self, slos: SloService) -> None:
        with pytest.raises(BadDocument, match="default"):
            await slos.remove("default")


class TestMigrations:
    ASKED = MigrationRequest(source="e0", target="e1", prompt=list(range(10)))

    async def test_all_tokens_but_the_last_are_sent_and_the_pin_is_lifted(self, world: World) -> None:
        source, target = await world.join("e0"), await world.join("e1", matched=4)
        done = await world.services.migrations.run(self.ASKED)
        assert source.calls == [("remote_send", ("room", 4, 9)), ("aclose", None)]
        assert target.calls == [("prep_recv", (10, 9)), ("abort", None), ("aclose", None)]
        assert (done.already_there_tokens, done.moved_tokens, done.bytes) == (4, 5, 640)
        assert await world.services.migrations.recent() == [done]

    async def test_nothing_is_sent_when_the_target_holds_it_all(self, world: World) -> None:
        source, _ = await world.join("e0"), await world.join("e1", matched=9)
        done = await world.services.migrations.run(self.ASKED)
        assert source.verbs() == ["aclose"]
        assert (done.moved_tokens, done.bytes) == (0, 0)

    async def test_a_failed_transfer_frees_the_room_and_is_reported(self, world: World) -> None:
        await world.join("e0", fails={"remote_send": TransferFailed("cut")})
        target = await world.join("e1")
        with pytest.raises(TransferFailed):
            await world.services.migrations.run(self.ASKED)
        assert target.verbs() == ["prep_recv", "abort", "aclose"]
        assert await world.services.migrations.recent() == []


class TestKnobs:
    PLAN = PlanChange(pattern="data_parallel", knobs=Knobs(chunked_prefill_tokens=256))
    CONFIG = Config(chunked_prefill_tokens=256)

    async def test_each_engine_is_told_once(self, world: World) -> None:
        engine = await world.join("e0")
        await world.services.plans.issue(self.PLAN)
        await world.services.applier.apply()
        await world.services.applier.apply()
        assert engine.configs() == [self.CONFIG]

    async def test_a_round_that_breaks_as_nobody_foresaw_is_followed_by_the_next(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = await world.join("e0")
        await world.services.plans.issue(self.PLAN)
        current, rounds = world.services.plans.current, iter([ArithmeticError])

        async def breaks_once() -> object:
            for defect in rounds:
                raise defect
            return await current()

        monkeypatch.setattr(world.services.plans, "current", breaks_once)
        task = asyncio.create_task(world.services.applier.run(poll_s=0.01))
        await until(engine.configs, "the engine is told")
        task.cancel()

    async def test_a_plan_without_engine_knobs_leaves_engines_alone(self, world: World) -> None:
        engine = await world.join("e0")
        await world.services.plans.issue(PlanChange(pattern="data_parallel"))
        await world.services.applier.apply()
        assert engine.calls == []

    async def test_a_late_engine_and_a_restarted_one_are_told(self, world: World) -> None:
        await world.join("e0")
        await world.services.plans.issue(self.PLAN)
        await world.services.applier.apply()
        restarted, late = await world.join("e0", epoch="2"), await world.join("e1")
        await world.services.applier.apply()
        assert restarted.configs() == late.configs() == [self.CONFIG]

    async def test_an_engine_that_fails_is_told_again_and_does_not_keep_others_waiting(self, world: World) -> None:
        broken = await world.join("e0", fails={"config": EngineUnreachable("gone")})
        sound = await world.join("e1")
        await world.services.plans.issue(self.PLAN)
        await world.services.applier.apply()
        broken.fails.clear()
        await world.services.applier.apply()
        assert broken.configs() == [self.CONFIG, self.CONFIG]
        assert sound.configs() == [self.CONFIG]

    @pytest.mark.parametrize("url", ["gpu1:8000", "https://gpu1:8000", "http://gpu1:99999", "http://[::1", ""])
    async def test_an_engine_that_announces_an_address_of_no_use_is_left_out(self, world: World, url: str) -> None:
        await world.announce("e0", url)
        sound = await world.join("e1")
        await world.services.plans.issue(self.PLAN)
        await world.services.applier.apply()
        assert sound.configs() == [self.CONFIG]
        with pytest.raises(EngineUnreachable, match="engine 'e0' announces an address of no use"):
            await world.services.calls.drain("e0", on=True)


class TestHttp:
    @pytest.mark.parametrize(
        "header", [None, "Bearer wrong", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"]
    )
    async def test_only_the_token_opens_the_api(self, api: httpx.AsyncClient, header: str | None) -> None:
        del api.headers["authorization"]
        headers = {} if header is None else {b"authorization": header.encode("latin-1")}
        for method, path in (
            ("GET", "/v1/plan"),
            ("PUT", "/v1/slo"),
            ("POST", "/v1/migrations"),
            ("GET", "/v1/engines"),
        ):
            answer = await api.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")

    async def test_health_needs_no_token(self, api: httpx.AsyncClient) -> None:
        del api.headers["authorization"]
        assert (await api.get("/healthz")).status_code == 200

    async def test_a_put_plan_is_in_force_and_in_the_history(self, api: httpx.AsyncClient) -> None:
        body = {"pattern": "balanced", "knobs": {"offload_ratio": 0.1}, "reason": "try it"}
        answer = await api.put("/v1/plan", json=body)
        assert answer.status_code == 200
        assert answer.json()["plan"]["version"] == 2
        assert (await api.get("/v1/plan")).json() == answer.json()["plan"]
        history = (await api.get("/v1/plan/history", params={"count": 1})).json()["plans"]
        assert history == [answer.json()["plan"]]

    async def test_a_role_for_an_engine_that_is_not_there_is_accepted_with_a_warning(
        self, api: httpx.AsyncClient
    ) -> None:
        answer = await api.put(
            "/v1/plan", json={"pattern": "disaggregated", "roles": {"ghost": "prefill", "e1": "decode"}}
        )
        assert answer.status_code == 200
        assert "'ghost'" in answer.json()["warnings"][0]

    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "says"),
        [
            ("PUT", "/v1/plan", {"pattern": "magic"}, 422, ("'magic'", "balanced")),
            ("PUT", "/v1/plan", {"pattern": "balanced"}, 422, ("offload_ratio",)),
            (
                "PUT",
                "/v1/plan",
                {"pattern": "balanced", "knobs": {"offload_ratio": 2}},
                422,
                ("knobs.offload_ratio", "2"),
            ),
            ("PUT", "/v1/plan", {"pattern": "balanced", "knobs": {"ratio": 0.2}}, 422, ("knobs.ratio",)),
            ("PUT", "/v1/plan", {"pattern": "disaggregated", "expected_version": 9}, 409, ("version 1", "9")),
            ("POST", "/v1/plan/rollback", {"version": 9}, 404, ("9", "kept")),
            ("PUT", "/v1/slo", {"classes": {"chat": {"ttft_ms": 1, "tpot_ms": 1}}}, 422, ("default",)),
            ("PUT", "/v1/slo/chat", {"ttft_ms": -1, "tpot_ms": 1}, 422, ("ttft_ms", "-1")),
            ("PUT", "/v1/slo/Chat", {"ttft_ms": 1, "tpot_ms": 1}, 422, ("Chat",)),
            ("DELETE", "/v1/slo/chat", None, 404, ("chat", "default")),
            ("DELETE", "/v1/slo/default", None, 422, ("default",)),
            ("POST", "/v1/engines/e9/drain", None, 404, ("e9", "none")),
            ("POST", "/v1/migrations", {"source": "e0", "target": "e0", "prompt": [1, 2]}, 422, ("e0",)),
            ("POST", "/v1/migrations", {"source": "e0", "target": "e1", "prompt": [1]}, 422, ("prompt",)),
            ("GET", "/v1/nothing", None, 404, ()),
        ],
    )
    async def test_errors_are_problems_with_a_sentence(
        self, api: httpx.AsyncClient, method: str, path: str, body: object, status: int, says: Sequence[str]
    ) -> None:
        answer = await api.request(method, path, json=body)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == status
        assert all(part in problem["detail"] for part in says), problem["detail"]

    async def test_malformed_json_is_a_problem_too(self, api: httpx.AsyncClient) -> None:
        answer = await api.put("/v1/plan", content=b"{", headers={"content-type": "application/json"})
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")

    async def test_slo_table_can_be_replaced_and_edited(self, api: httpx.AsyncClient) -> None:
        slo = {"ttft_ms": 500, "tpot_ms": 50}
        table = (await api.put("/v1/slo", json={"classes": {"default": slo, "chat": slo}})).json()
        assert (table["version"], sorted(table["classes"])) == (2, ["chat", "default"])
        edited = (await api.put("/v1/slo/chat", json=slo | {"attainment": 0.5})).json()
        assert edited["classes"]["chat"]["attainment"] == 0.5
        removed = (await api.delete("/v1/slo/chat")).json()
        assert (await api.get("/v1/slo")).json() == removed
        assert sorted(removed["classes"]) == ["default"]

    async def test_routers_say_whether_they_are_up_to_date(self, api: httpx.AsyncClient, redis_url: str) -> None:
        store = open_store(redis_url)
        for router_id, version in (("old", 1), ("new", 2)):
            beat = RouterBeat(router_id=router_id, url="http://r", plan_version=version)
            await store.heartbeat(KEYS.router(router_id), msgspec.json.encode(beat), 60)
        await store.aclose()
        await api.put("/v1/plan", json={"pattern": "disaggregated"})
        found = (await api.get("/v1/routers")).json()["routers"]
        assert {router["router_id"]: router["up_to_date"] for router in found} == {"old": False, "new": True}


class TestHttpOverFakeEngines:
    @pytest.fixture
    async def api(self, world: World) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(create_app(world.services, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            yield client

    async def test_engines_are_listed_with_their_role(self, world: World, api: httpx.AsyncClient) -> None:
        await world.join("e0")
        await world.services.plans.issue(
            PlanChange(pattern="disaggregated", roles={"e0": Role.PREFILL, "e1": Role.DECODE})
        )
        (engine,) = (await api.get("/v1/engines")).json()["engines"]
        assert (engine["engine_id"], engine["role"], engine["load"]["running"]) == ("e0", "prefill", 0)

    async def test_drain_and_undrain_reach_the_engine(self, world: World, api: httpx.AsyncClient) -> None:
        engine = await world.join("e0")
        assert (await api.post("/v1/engines/e0/drain")).json() == {"engine_id": "e0", "draining": True}
        assert (await api.post("/v1/engines/e0/undrain")).json() == {"engine_id": "e0", "draining": False}
        assert [value for verb, value in engine.calls if verb == "drain"] == [True, False]

    async def test_an_engine_that_has_no_room_answers_429_and_one_that_is_gone_502(
        self, world: World, api: httpx.AsyncClient
    ) -> None:
        await world.join("e0")
        target = await world.join("e1", fails={"prep_recv": NoKvRoom("full")})
        body = {"source": "e0", "target": "e1", "prompt": [1, 2, 3]}
        assert (await api.post("/v1/migrations", json=body)).status_code == 429
        target.fails["prep_recv"] = EngineUnreachable("gone")
        assert (await api.post("/v1/migrations", json=body)).status_code == 502


async def test_a_store_that_is_away_is_a_503_that_says_so(free_port: Callable[[], int]) -> None:
    store = open_store(f"redis://127.0.0.1:{free_port()}/0")
    transport = httpx.ASGITransport(create_app(Services.wire(store, MODEL), None))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for path in ("/v1/plan", "/healthz"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert "Redis" in answer.json()["detail"]
    await store.aclose()


def test_an_exposed_api_without_a_token_does_not_start() -> None:
    with pytest.raises(BadSettings, match="TRIMTAB_ADMIN_TOKEN"):
        run(AdminSettings(model=MODEL, admin_host="0.0.0.0", admin_port=0, admin_token=None))
