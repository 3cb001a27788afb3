"""Controllers around one store, with a scripted search, in a time that the test moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from controller import search_jobs
from controller.admin.services import Services
from controller.controller_metrics import ControllerMetrics
from controller.decisions import DecisionRecord
from controller.leadership import Leadership
from controller.loop import ControlLoop, LoopSettings
from controller.observing import Observer
from controller.search_worker import WorkerFailed
from controller.store import Keys, MemoryStore, StoreUnavailable
from engines.emulated.profile import load_profile
from engines.records import ArrivalBatch, Outcome, RequestRecord
from engines.telemetry import Heartbeat
from engines.types import EngineInfo, EngineLoad
from tuner.candidates import candidate_of, explicit_knobs, split
from tuner.latency import LatencyModels
from tuner.observe import Window
from tuner.plan import HotPrefix
from tuner.settings import TunerSettings
from tuner.task import SearchTask
from tuner.twin.types import Forecast
from tuner.types import Candidate, Prediction, SearchResult

MODEL = "loop-model"
KEYS = Keys(MODEL)
PROFILE = load_profile("laptop")
KNOWN = ("balanced", "data_parallel", "disaggregated")
TUNER = TunerSettings(min_requests=10, transient_s=1e9)
"""Nothing has to be waited for: a change is published by the tick that finds it."""


class Away(MemoryStore):
    """A store that can be made to fail."""

    away = False

    def _check_open(self) -> None:
        if self.away:
            raise StoreUnavailable("gone")
        super()._check_open()


@dataclass
class ScriptedSearch:
    """Stands for the worker: `best` is said to be worth twice the plan in force. `meanwhile` runs during a search."""

    best: Callable[[SearchTask], Candidate]
    meanwhile: Callable[[], Any] | None = None
    copies: bool = False
    """Whether copies of all hot contexts are said to pay."""
    fails: bool = False
    tasks: list[SearchTask] = field(default_factory=list)

    async def run(self, _limit_s: float, job: object, task: SearchTask) -> SearchResult:
        assert job is search_jobs.search
        self.tasks.append(task)
        if self.meanwhile is not None:
            await self.meanwhile()
        if self.fails:
            raise WorkerFailed("the search worker died")
        incumbent = prediction(candidate_of(task.plan, task.engines), 5.0)
        best = prediction(self.best(task), 10.0)
        if best.candidate == incumbent.candidate:
            best = incumbent
        engines = tuple(engine.engine_id for engine in task.engines)
        hot = [HotPrefix(prefix=each.prefix, blocks=each.blocks, engines=engines) for each in task.hot if self.copies]
        return SearchResult([best, incumbent], incumbent, incumbent, trials=7, seconds=0.1, replicas=tuple(hot))


def prediction(candidate: Candidate, goodput_rps: float) -> Prediction:
    forecast = Forecast(10.0, goodput_rps, goodput_rps, 0.0, {}, {}, {})
    return Prediction(candidate, forecast, goodput_rps, 10.0, 0.0, goodput_rps, goodput_rps - 5.0, 0.01)


def one_prefill(task: SearchTask) -> Candidate:
    return split(len(task.engines), 1, 0.1, explicit_knobs(task.engines))


@dataclass
class Controller:
    loop: ControlLoop
    leadership: Leadership
    services: Services
    search: ScriptedSearch
    registry: CollectorRegistry

    async def tick(self) -> DecisionRecord | None:
        await self.leadership.look()
        return await self.loop.tick()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@dataclass
class World:
    """Everything that controllers share. Traffic is steady: ten requests a second, all of them good."""

    now_s: float = 1_700_000_000.0
    served: int = 0
    begins_with: tuple[int, ...] = ()
    """Hashes that the sketch of every request begins with."""
    store: Away = field(init=False)

    def __post_init__(self) -> None:
        self.store = Away(now_s=lambda: self.now_s)

    def controller(self, name: str = "a", recovery_s: float = 0.0, tuner: TunerSettings = TUNER) -> Controller:
        services = Services.wire(self.store, MODEL, now_s=lambda: self.now_s, known=lambda: KNOWN)
        window = Window(warm_up_s=0)

        def models(learnt: bytes | None) -> LatencyModels:
            priors = {"laptop": PROFILE}
            return LatencyModels.from_state(learnt, priors) if learnt else LatencyModels(priors)

        observer = Observer(self.store, KEYS, window, models, tuner.window_s)
        leadership = Leadership(self.store, KEYS.leader, name, 10.0, lambda: self.now_s)
        search, registry = ScriptedSearch(one_prefill), CollectorRegistry()
        settings = LoopSettings(controller_id=name, tick_s=10.0, recovery_s=recovery_s, tuner=tuner)
        metrics = ControllerMetrics(registry)
        metrics.follow(lambda: leadership.lease is not None, lambda: leadership.times, observer.seen)
        loop = ControlLoop(
            services, KEYS, observer, leadership, search, metrics, settings,  # type: ignore[arg-type]
            lambda: self.now_s, lambda: self.now_s,
        )  # fmt: skip
        return Controller(loop, leadership, services, search, registry)

    async def goes_on(self, seconds: int = 10, engines: Sequence[int] = (0, 1), plan_version: int = 1) -> None:
        """Let time pass with traffic; heartbeats at its end."""
        for _ in range(seconds * 10):
            self.now_s += 0.1
            await self._serve_one(plan_version)
        await self.beat(engines)

    async def beat(self, engines: Sequence[int]) -> None:
        for number in engines:
            info = EngineInfo(
                engine_id=f"e{number}",
                url=f"http://e{number}",
                kind="laptop",
                model=MODEL,
                context_length_tokens=PROFILE.context_length_tokens,
                kv_capacity_tokens=PROFILE.kv_capacity_tokens,
                kv_layout=PROFILE.kv_layout,
                transports=("tcp",),
                epoch="1",
            )
            beat = Heartbeat(info=info, load=EngineLoad(kv_capacity_tokens=PROFILE.kv_capacity_tokens))
            await self.store.heartbeat(KEYS.engine(info.engine_id), msgspec.json.encode(beat), 5)

    async def _serve_one(self, plan_version: int) -> None:
        self.served += 1
        request_id, at_s = f"r{self.served}", self.now_s - 0.5
        arrival = ArrivalBatch(
            router_id="r", request_ids=(request_id,), arrived_at_s=(at_s,), prompt_tokens=(200,), prompt_bytes=(800,),
            slo_classes=("default",), plan_versions=(plan_version,), prefix_hashes=((*self.begins_with, self.served),),
        )  # fmt: skip
        record = RequestRecord(
            request_id=request_id, router_id="r", slo_class="default", arrived_at_s=at_s, outcome=Outcome.OK,
            status=200, api="completions", stream=True, pattern="data_parallel", plan_version=plan_version,
            prompt_tokens=200, cached_tokens=0, output_tokens=20, ttft_s=0.1, tpot_s=0.01, e2e_s=0.3,
        )  # fmt: skip
        await self.store.append(KEYS.arrivals, [msgspec.json.encode(arrival)], 100_000)
        await self.store.append(KEYS.requests, [msgspec.json.encode(record)], 100_000)
