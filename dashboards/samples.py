"""One example of everything that metrics are made from, so that each family can be seen with its labels."""

from controller.controller_metrics import ModelQuality, Seen
from controller.decisions import DecisionRecord
from engines.types import EngineInfo, KvLayout, Role
from tuner.placement import EngineView
from tuner.plan import BALANCED, Admission, IssuedBy, Knobs, Plan
from tuner.slo import BOOTSTRAP_SLOS
from tuner.twin.types import Forecast
from tuner.types import Candidate, Measured, Mode, Prediction, Reason, SearchResult

SLOS = BOOTSTRAP_SLOS
ENGINE_INFO = EngineInfo(
    engine_id="e0",
    url="http://127.0.0.1:8000",
    kind="laptop",
    model="m",
    context_length_tokens=4096,
    kv_capacity_tokens=65536,
    kv_layout=KvLayout(model="m", dtype="float16", layers=1, kv_heads=1, head_dim=1),
    transports=("tcp",),
    epoch="0",
)
VIEWS = (EngineView("e0", Role.PREFILL, prefill_tokens_per_s=1000.0), EngineView("e1", Role.DECODE))
KNOBS = Knobs(
    offload_ratio=0.1,
    admission=Admission.QUEUE,
    max_running_per_engine=8,
    chunked_prefill_tokens=512,
    prefill_decode_interval=1,
)
PLAN = Plan(
    version=1,
    issued_at_s=1.0,
    issued_by=IssuedBy.TUNER,
    reason="an example",
    pattern=BALANCED,
    knobs=KNOBS,
    roles={"e0": Role.PREFILL, "e1": Role.DECODE},
)
SEEN = Seen(
    read={"requests": 1},
    refused={("requests", "late"): 1},
    newest_s={"requests": 1.0},
    engines={"laptop": 2},
    models=(ModelQuality("laptop", "prefill", 0.1, 100),),
)


def tick() -> DecisionRecord:
    """A tick that measured, searched and published."""
    prediction = _prediction()
    return DecisionRecord(
        at_s=1.0,
        controller_id="c0",
        mode=Mode.AUTO,
        reason=Reason.DRIFT,
        sentence="an example",
        plan_version=1,
        published_version=2,
        chosen=prediction.candidate,
        promise=prediction,
        search=SearchResult([prediction], prediction, prediction, trials=1, seconds=1.0),
        measured=Measured(60.0, 60, 1.0, 1.0, {"default": 1.0}),
        drifted=("rate",),
        tick_s=1.0,
    )


def _prediction() -> Prediction:
    forecast = Forecast(
        offered_rps=1.0,
        goodput_rps=1.0,
        weighted_goodput=1.0,
        shortfall=0.0,
        classes={},
        utilisation={"prefill": 0.5},
        causes={},
    )
    candidate = Candidate(BALANCED, KNOBS, prefill_engines=1, decode_engines=1, mixed_engines=0)
    return Prediction(candidate, forecast, goodput_rps=1.0, offered_rps=1.0, shortfall=0.0, score=1.0)
