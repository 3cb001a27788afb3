import pytest

from engines.types import Role
from tuner.placement import EngineView, PlacementRequest, Verdict, admit, place, split_end
from tuner.plan import BOOTSTRAP_PLAN, Admission, IssuedBy, Knobs, Plan, Policy
from tuner.slo import Slo


def plan(pattern: str = "data_parallel", roles=None, **knobs) -> Plan:
    return Plan(
        version=1,
        issued_at_s=0,
        issued_by=IssuedBy.OPERATOR,
        reason="test",
        pattern=pattern,
        knobs=Knobs(**knobs),
        roles=roles or {},
    )


def view(engine_id: str, **given) -> EngineView:
    return EngineView(engine_id=engine_id, **({"kv_free_tokens": 10_000} | given))


def request(tokens: int = 1000, cached=None, avoid=(), splittable: bool = True) -> PlacementRequest:
    return PlacementRequest(tokens, cached or {}, frozenset(avoid), splittable)


A, B, C = view("a"), view("b"), view("c")

DATA_PARALLEL_CASES = {
    "round robin takes turns": (plan(policy=Policy.ROUND_ROBIN), request(), [A, B, C], 4, ("b", "c", "a")),
    "least load prefers the fewest in flight": (
        plan(),
        request(),
        [view("a", inflight=2), view("b", inflight=1), C],
        0,
        ("c", "b", "a"),
    ),
    "pending prefill outweighs a few running requests": (
        plan(),
        request(),
        [view("a", pending_prefill_tokens=5000), view("b", inflight=3)],
        0,
        ("b", "a"),
    ),
    "equal loads keep the given order": (plan(), request(), [B, A], 0, ("b", "a")),
    "affinity goes where the prefix is": (
        plan(policy=Policy.PREFIX_AFFINITY),
        request(cached={"b": 800}),
        [A, B, C],
        0,
        ("b", "a", "c"),
    ),
    "affinity gives way when that engine is busier than the prefix is worth": (
        plan(policy=Policy.PREFIX_AFFINITY),
        request(cached={"b": 800}),
        [A, view("b", pending_prefill_tokens=900)],
        0,
        ("a", "b"),
    ),
    "an engine that is down gets nothing": (plan(), request(), [view("a", available=False), B], 0, ("b",)),
    "an engine that failed this request is avoided": (plan(), request(avoid=["a"]), [A, B], 0, ("b",)),
    "prefill engines do not decode": (
        plan(),
        request(),
        [view("a", role=Role.PREFILL), view("b", role=Role.DECODE, inflight=9)],
        0,
        ("b",),
    ),
    "unless nobody else is left": (plan(), request(), [view("a", role=Role.PREFILL)], 0, ("a",)),
    "no engines, no placement": (plan(), request(), [], 0, ()),
}


@pytest.mark.parametrize("case", DATA_PARALLEL_CASES.values(), ids=DATA_PARALLEL_CASES.keys())
def test_data_parallel_ranks_engines(case):
    given, asked, engines, turn, expected = case
    placement = place(given, asked, engines, turn)
    assert placement.decode == expected
    assert not placement.is_split


P, D = view("p", role=Role.PREFILL), view("d", role=Role.DECODE)

SPLIT_CASES = {
    "disaggregated leaves the last token to D": (plan("disaggregated"), request(), [P, D], ("d", "p", 999)),
    "balanced leaves a tenth": (plan("balanced", offload_ratio=0.1), request(), [P, D], ("d", "p", 900)),
    "mixed engines: P is not D": (plan("disaggregated"), request(), [A, view("b", kv_free_tokens=1)], ("a", "b", 999)),
    "a single engine cannot split": (plan("disaggregated"), request(), [A], ("a", None, None)),
    "a short prompt skips P": (
        plan("disaggregated", min_remote_tokens=1001),
        request(),
        [P, D],
        ("d", None, None),
    ),
    "a short uncached part skips P": (
        plan("disaggregated", min_remote_tokens=300),
        request(cached={"d": 800}),
        [P, D],
        ("d", None, None),
    ),
    "a prompt mostly on D skips P": (
        plan("disaggregated", bypass_cached_fraction=0.5),
        request(cached={"d": 500}),
        [P, D],
        ("d", None, None),
    ),
    "a prompt less cached on D does not": (
        plan("disaggregated", bypass_cached_fraction=0.5),
        request(cached={"d": 499}),
        [P, D],
        ("d", "p", 999),
    ),
    "one token cannot be split": (plan("disaggregated"), request(1), [P, D], ("d", None, None)),
    "what must not be split is not": (plan("disaggregated"), request(splittable=False), [P, D], ("d", None, None)),
    "P is the one with the shortest queue time": (
        plan("disaggregated"),
        request(),
        [
            view("p1", role=Role.PREFILL, pending_prefill_tokens=4000, prefill_tokens_per_s=10_000.0),
            view("p2", role=Role.PREFILL, pending_prefill_tokens=3000, prefill_tokens_per_s=5_000.0),
            D,
        ],
        ("d", "p1", 999),
    ),
    "P's own cache shortens its queue": (
        plan("disaggregated"),
        request(cached={"p2": 900}),
        [view("p1", role=Role.PREFILL), view("p2", role=Role.PREFILL, pending_prefill_tokens=500), D],
        ("d", "p2", 999),
    ),
    "D is the one with the most free KV": (
        plan("disaggregated"),
        request(),
        [P, view("d1", role=Role.DECODE, kv_free_tokens=10), view("d2", role=Role.DECODE, kv_free_tokens=20)],
        ("d2", "p", 999),
    ),
    "D beyond the load bound comes last": (
        plan("disaggregated"),
        request(),
        [P, view("d1", role=Role.DECODE, kv_free_tokens=1), view("d2", role=Role.DECODE, inflight=9)],
        ("d1", "p", 999),
    ),
    "affinity beats free KV when most of the prompt is there": (
        plan("disaggregated", policy=Policy.PREFIX_AFFINITY),
        request(cached={"d1": 600}),
        [P, view("d1", role=Role.DECODE, kv_free_tokens=10), view("d2", role=Role.DECODE)],
        ("d1", "p", 999),
    ),
    "only decode engines left: no P": (plan("disaggregated"), request(), [D], ("d", None, None)),
    "P is down: another engine prefills": (
        plan("disaggregated"),
        request(),
        [view("p", role=Role.PREFILL, available=False), D, view("m", kv_free_tokens=1)],
        ("d", "m", 999),
    ),
}


@pytest.mark.parametrize("case", SPLIT_CASES.values(), ids=SPLIT_CASES.keys())
def test_split_patterns_choose_engines_and_split(case):
    given, asked, engines, (decode, prefill, end) = case
    placement = place(given, asked, engines, turn=0)
    assert placement.decode[0] == decode
    assert (placement.prefill or (None,))[0] == prefill
    assert placement.end == end


@pytest.mark.parametrize(
    ("tokens", "ratio", "end"),
    [(10, 0.0, 9), (10, 0.1, 9), (10, 0.25, 8), (2, 0.99, 1), (2, 0.0, 1), (3000, 0.1, 2700), (3001, 0.1, 2701)],
)
def test_split_rounds_up_and_leaves_at_least_one_token_on_each_side(tokens, ratio, end):
    assert split_end(tokens, ratio) == end


SLO = Slo(ttft_ms=1000, tpot_ms=50)

ADMISSION_CASES = [
    (plan(), view("a", inflight=999), Verdict.ADMIT),
    (plan(admission=Admission.QUEUE, max_running_per_engine=4), view("a", inflight=3), Verdict.ADMIT),
    (plan(admission=Admission.QUEUE, max_running_per_engine=4), view("a", inflight=4), Verdict.WAIT),
    (plan(admission=Admission.QUEUE), view("a", inflight=999), Verdict.ADMIT),
    (plan(admission=Admission.SHED), view("a", pending_prefill_tokens=10**6), Verdict.ADMIT),
    (
        plan(admission=Admission.SHED),
        view("a", pending_prefill_tokens=9_001, prefill_tokens_per_s=10_000.0),
        Verdict.SHED,
    ),
    (
        plan(admission=Admission.SHED),
        view("a", pending_prefill_tokens=9_000, prefill_tokens_per_s=10_000.0),
        Verdict.ADMIT,
    ),
]


@pytest.mark.parametrize(("given", "engine", "verdict"), ADMISSION_CASES)
def test_admission_follows_the_plan(given, engine, verdict):
    assert admit(given, SLO, request(), engine, engine) is verdict


def test_placing_changes_nothing_and_is_repeatable():
    engines = [view("a", inflight=1), view("b"), P, D]
    asked = request(cached={"b": 10})
    before = [repr(engine) for engine in engines]
    assert place(plan("disaggregated"), asked, engines, 3) == place(plan("disaggregated"), asked, engines, 3)
    assert [repr(engine) for engine in engines] == before


def test_the_bootstrap_plan_places():
    assert place(BOOTSTRAP_PLAN, request(), [A], 0).decode == ("a",)
