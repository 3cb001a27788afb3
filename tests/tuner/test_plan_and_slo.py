import json
import re

import pytest

from tuner.plan import BOOTSTRAP_PLAN, BadDocument, Knobs, Plan, parse
from tuner.slo import BOOTSTRAP_SLOS, Slo, SloTable

GOOD = {
    "version": 3,
    "issued_at_s": 1.5,
    "issued_by": "operator",
    "reason": "because",
    "pattern": "balanced",
    "knobs": {"offload_ratio": 0.1},
    "roles": {"e0": "prefill", "e1": "decode"},
    "replicas": [{"prefix": "00000000000000ff", "blocks": 4, "engines": ["e0", "e1"]}],
}


def changed(**patch) -> bytes:
    return json.dumps(GOOD | patch).encode()


def test_a_plan_survives_the_round_trip():
    plan = parse(Plan, changed())
    assert parse(Plan, plan.model_dump_json()) == plan
    assert plan.role_of("e0") == "prefill"
    assert plan.role_of("unknown") == "mixed"
    assert plan.replicas[0].block_hash == 255


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ({"knobs": {"offload_ratio": 1.0}}, "knobs.offload_ratio: Input should be less than 1 (got 1.0)"),
        ({"knobs": {"offload_ratio": 0}}, "for 0 use 'disaggregated'"),
        ({"knobs": {"offload_ration": 0.1}}, "knobs.offload_ration"),
        ({"pattern": "disaggregated"}, "use 'balanced'"),
        ({"pattern": "data_parallel"}, "has no split"),
        ({"pattern": "migrate"}, "cannot be a plan"),
        ({"pattern": "no spaces"}, "pattern:"),
        ({"replicas": [{"prefix": "07", "blocks": 4, "engines": ["e0"]}]}, "replicas.0.prefix"),
        ({"replicas": [{"prefix": "0" * 16, "blocks": 0, "engines": ["e0"]}]}, "replicas.0.blocks"),
        ({"replicas": [{"prefix": "0" * 16, "blocks": 4, "engines": []}]}, "replicas.0.engines"),
        ({"replicas": [{"prefix": "0" * 16, "blocks": 4, "engines": ["e0"]}] * 17}, "replicas:"),
        ({"roles": {"e0": "boss"}}, "roles.e0"),
        ({"version": -1}, "version:"),
        ({"issued_by": "someone"}, "issued_by:"),
        ({"surprise": 1}, "surprise:"),
        ({"knobs": {"offload_ratio": 0.1, "max_inflight_transfers": 0}}, "knobs.max_inflight_transfers"),
    ],
)
def test_a_bad_plan_is_refused_whole_with_a_sentence(patch, sentence):
    with pytest.raises(BadDocument, match=re.escape(sentence)):
        parse(Plan, changed(**patch))


def test_broken_json_is_refused_with_a_sentence():
    with pytest.raises(BadDocument, match="Invalid JSON"):
        parse(Plan, b"{")


def test_every_fault_is_named_at_once():
    with pytest.raises(BadDocument) as refused:
        parse(Plan, changed(version=-1, reason=""))
    assert "version:" in str(refused.value)
    assert "reason:" in str(refused.value)


def test_plans_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        BOOTSTRAP_PLAN.version = 7  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        Knobs().offload_ratio = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [(0.5, 0.04, True), (0.5, None, True), (0.51, 0.04, False), (0.5, 0.041, False), (None, None, False)],
)
def test_a_request_is_good_when_both_bounds_hold(ttft_s, tpot_s, met):
    assert Slo(ttft_ms=500, tpot_ms=40).met(ttft_s, tpot_s) is met


def test_unknown_and_absent_classes_are_the_default():
    table = SloTable(version=1, classes=dict(BOOTSTRAP_SLOS.classes) | {"chat": Slo(ttft_ms=1, tpot_ms=1)})
    assert [table.resolve(name) for name in (None, "chat", "x")] == ["default", "chat", "default"]


@pytest.mark.parametrize("classes", [{}, {"chat": {"ttft_ms": 1, "tpot_ms": 1}}])
def test_a_table_without_the_default_class_is_refused(classes):
    with pytest.raises(BadDocument, match="classes"):
        parse(SloTable, json.dumps({"version": 1, "classes": classes}))


@pytest.mark.parametrize("patch", [{"ttft_ms": 0}, {"tpot_ms": -1}, {"attainment": 1.1}, {"weight": 0}, {"x": 1}])
def test_an_slo_that_cannot_be_is_refused(patch):
    slo = {"ttft_ms": 1, "tpot_ms": 1} | patch
    with pytest.raises(BadDocument, match=next(iter(patch))):
        parse(SloTable, json.dumps({"classes": {"default": slo}}))
