"""Orders and bodies: what the load asks for is what the backend understands."""

import json

import pytest

from benchmarks.router.scenarios import DISTINCT_PROMPTS, SCENARIOS, bodies, path_of
from benchmarks.router.wire import MARK, MARK_BYTES, NO_ORDER, ORDER, Order, read_order


def test_an_order_is_found_inside_a_json_body():
    assert read_order(b'{"prompt":"why? ' + ORDER % (42, 10_000, 100) + b'"}') == Order(42, 10_000, 100)


@pytest.mark.parametrize("body", [b"", b'{"prompt":[1,2]}', b"a # b", b'{"prompt":"#000001 0100'])
def test_a_body_without_a_whole_order_has_none(body):
    assert read_order(body) == NO_ORDER


def test_marks_have_one_width_whatever_they_hold():
    assert len(MARK % (99_999, 2**63, 999_999, 10**12)) == MARK_BYTES


@pytest.mark.parametrize(
    "scenario", [each for each in SCENARIOS.values() if each.prompt != "ids"], ids=lambda s: s.name
)
def test_text_bodies_are_json_that_carries_the_order(scenario):
    body = bodies(scenario, True, seed=1)(7)
    assert json.loads(body)["stream"] is scenario.stream
    assert read_order(body) == Order(7, scenario.gap_us, scenario.chunks)


def test_prompts_come_round_again_so_that_prefixes_are_shared():
    body = bodies(SCENARIOS["t"], True, seed=1)
    first, again = (json.loads(body(number))["messages"][0]["content"] for number in (3, 3 + DISTINCT_PROMPTS))
    assert first[:12_000] == again[:12_000]
    assert first != again
    assert len(first) == pytest.approx(12_000, abs=100)


@pytest.mark.parametrize(
    ("takes_ids", "path", "key"), [(True, "/v1/completions", "prompt"), (False, "/generate", "input_ids")]
)
def test_token_ids_go_where_the_target_takes_them(takes_ids, path, key):
    scenario = SCENARIOS["d"]
    body = bodies(scenario, takes_ids, seed=1)(0)
    assert path_of(scenario, takes_ids) == path
    assert len(json.loads(body)[key]) == 3_000
    assert 12_000 < len(body) < 15_000


def test_the_seed_decides_the_prompts():
    same, other = bodies(SCENARIOS["d"], True, seed=1)(0), bodies(SCENARIOS["d"], True, seed=2)(0)
    assert same == bodies(SCENARIOS["d"], True, seed=1)(0)
    assert same != other
