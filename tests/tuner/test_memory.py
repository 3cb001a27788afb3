"""A controller that runs for days must not grow: everything that a tick touches, for a simulated day."""

import gc
import random
import tracemalloc

import pytest

from engines.records import ArrivalBatch, Outcome, PassRecord, RequestRecord
from engines.types import EngineInfo
from tests.support.traffic import engine_states
from tuner.candidates import candidate_of
from tuner.latency import LatencyModels
from tuner.latency_prior import shipped_priors
from tuner.observe import Window
from tuner.plan import BOOTSTRAP_PLAN
from tuner.settings import TunerSettings
from tuner.slo import BOOTSTRAP_SLOS
from tuner.tick import Tuner
from tuner.twin.types import Forecast
from tuner.types import EngineState, Mode, Observation, Prediction, SearchResult

KIND = "laptop"
FLEET = engine_states(2, KIND)
PROFILE = FLEET[0].profile
INFO = EngineInfo(
    engine_id="e0",
    url="http://e0",
    kind=KIND,
    model=PROFILE.model,
    context_length_tokens=PROFILE.context_length_tokens,
    kv_capacity_tokens=PROFILE.kv_capacity_tokens,
    kv_layout=PROFILE.kv_layout,
    transports=("tcp",),
    epoch="1",
)
TICK_S = 120
HOUR_S = 3600
EPOCH_S = 1e9
SEEN_ALL_S = 6 * HOUR_S
"""By then every kind of traffic has been there, and what is bounded is full."""
MOST_GROWTH_BYTES = 100_000
"""Of 18 hours and 16,000 requests: a leak of seven bytes a request would show."""


def interval(
    rng: random.Random, began_s: float, number: int
) -> tuple[ArrivalBatch, list[RequestRecord], list[PassRecord]]:
    """What two minutes leave in the streams; every hour the prompts are of another length."""
    prompt_tokens = 200 * (1 + number // 30 % 5)
    at_s = sorted(began_s + rng.random() * TICK_S for _ in range(60))
    ids = tuple(f"r-{number}-{index}" for index in range(60))
    arrivals = ArrivalBatch(
        router_id="r",
        request_ids=ids,
        arrived_at_s=tuple(at_s),
        prompt_tokens=(prompt_tokens,) * 60,
        prompt_bytes=(4 * prompt_tokens,) * 60,
        slo_classes=("default",) * 60,
        plan_versions=(0,) * 60,
        prefix_hashes=tuple((rng.getrandbits(64),) for _ in ids),
    )
    records = [
        RequestRecord(
            request_id=request_id,
            router_id="r",
            slo_class="default",
            arrived_at_s=arrived_s,
            outcome=Outcome.OK,
            status=200,
            api="completions",
            stream=True,
            pattern="data_parallel",
            plan_version=0,
            decode_engine="e0",
            prompt_tokens=prompt_tokens,
            output_tokens=50,
            ttft_s=0.2,
            tpot_s=0.02,
            e2e_s=1.2,
        )
        for request_id, arrived_s in zip(ids, at_s, strict=True)
    ]
    passes = [
        PassRecord(
            engine_id="e0",
            kind=KIND,
            at_s=began_s,
            wall_s=0.02 * rng.uniform(0.9, 1.1),
            prefill_tokens=0,
            prefill_context_tokens=0,
            decode_batch=rng.randint(1, 20),
            kv_tokens=rng.randint(100, 9000),
            queued=0,
        )
        for _ in range(50)
    ]
    return arrivals, records, passes


def searched() -> SearchResult:
    incumbent = candidate_of(BOOTSTRAP_PLAN, FLEET)
    same = Prediction(incumbent, Forecast(1, 1, 1, 0, {}, {}, {}), 1.0, 1.0, 0.0, 1.0)
    return SearchResult([same], same, same, 1, 0.1)


@pytest.mark.timeout(600)
def test_a_day_of_ticks_leaves_no_more_in_memory_than_six_hours():
    rng = random.Random(1)
    settings = TunerSettings(window_s=120)
    window, tuner = Window(span_s=600), Tuner(settings)
    models = LatencyModels(shipped_priors(), window.warm_up)
    sizes: dict[int, int] = {}
    tracemalloc.start()
    try:
        for number in range(24 * HOUR_S // TICK_S):
            now_s = EPOCH_S + (number + 1) * TICK_S
            arrivals, records, passes = interval(rng, now_s - TICK_S, number)
            window.engines_seen({"e0": "1", "e1": "1"}, now_s)
            window.add_arrivals([arrivals], now_s)
            window.add_requests(records, now_s)
            models.add_passes(passes)
            if number % 10 == 0:
                models.refit()
            profile = models.profile_for(KIND, INFO)
            observation = Observation(
                now_s=now_s,
                engines=[EngineState(each.engine_id, KIND, profile) for each in FLEET],
                slos=BOOTSTRAP_SLOS,
                plan=BOOTSTRAP_PLAN,
                workload=window.workload(now_s, settings.window_s),
                measured=window.measured(now_s, BOOTSTRAP_SLOS, 0, now_s - 60),
            )
            task = tuner.prepare(observation)
            tuner.decide(observation, searched() if task is not None else None, Mode.AUTO)
            if (number + 1) * TICK_S in (SEEN_ALL_S, 24 * HOUR_S):
                gc.collect()  # also gives back what the interpreter keeps for its next tuples
                sizes[(number + 1) * TICK_S] = tracemalloc.get_traced_memory()[0] + len(tuner.state())
    finally:
        tracemalloc.stop()
    assert sizes[24 * HOUR_S] - sizes[SEEN_ALL_S] < MOST_GROWTH_BYTES
