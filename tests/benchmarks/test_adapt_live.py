"""The live run: a client that times answers, and a stack that is what was asked for."""

import asyncio
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from benchmarks.adapt.generate import generate
from benchmarks.adapt.live.load import Client, Reply, Seen, prompt_ids
from benchmarks.adapt.live.run import SCENARIO, by_phase, report
from benchmarks.adapt.live.stack import live_stack
from benchmarks.adapt.outcome import Change, Outcome
from benchmarks.adapt.scenarios import ScenarioError, load_scenario
from benchmarks.adapt.statics import fixed_plan, patterns
from tuner.plan import DISAGGREGATED
from tuner.slo import Slo, SloTable

SLO = Slo(ttft_ms=100, tpot_ms=10)


@pytest.fixture
def workload():
    return generate(load_scenario(SCENARIO).shortened(4, 2), 5)


async def replied(first_s=0.05, last_s=0.1, status=200, complete=True):
    return Reply(asyncio.get_running_loop().create_future(), status, first_s, last_s, complete)


async def test_a_reply_is_timed_from_when_it_was_asked_for_to_its_first_and_last_token():
    assert (await replied()).times(0.01, tokens=6) == (pytest.approx(0.04), pytest.approx(0.01))
    assert math.isnan((await replied()).times(0.01, tokens=1)[1])


async def test_what_was_refused_or_broke_off_has_no_times():
    assert (await replied(status=429)).times(0.0, tokens=6) is None
    assert (await replied(complete=False)).times(0.0, tokens=6) is None
    assert (await replied(first_s=None, last_s=None)).times(0.0, tokens=6) is None


def test_a_request_is_good_if_all_of_it_came_within_both_bounds(workload):
    few = workload.take(slice(0, 5))
    slos = SloTable(classes=dict.fromkeys([*few.classes, "default"], SLO))
    seen = Seen(
        complete=np.array([True, True, True, True, False]),
        ttft_s=np.array([0.05, 0.2, 0.05, 0.05, np.nan]),
        tpot_s=np.array([0.005, 0.005, 0.05, np.nan, np.nan]),
    )
    assert seen.good(few, slos).tolist() == [True, False, False, True, False]


def test_prompts_share_their_roots_and_nothing_else(workload):
    shared = alike(workload, root=0, root_tokens=50, prompt_tokens=80)
    one, other = prompt_ids(shared, 0), prompt_ids(shared, 1)
    assert len(one) == 80
    assert one[:50] == other[:50]
    assert one[50] != other[50] or one[50:] != other[50:]
    assert prompt_ids(workload, 0)[:20] != prompt_ids(workload, 1)[:20]


def alike(workload, **columns):
    return replace(workload, **{name: np.full(len(workload), value) for name, value in columns.items()})


async def test_a_request_asks_for_exactly_what_the_workload_says(workload):
    client = Client("http://127.0.0.1:1", "m", workload)
    head, body = client.request(3).split(b"\r\n\r\n", 1)
    asked = msgspec.json.decode(body)
    assert len(asked["prompt"]) == workload.prompt_tokens[3]
    assert asked["max_tokens"] == workload.output_tokens[3]
    assert b"x-slo-class: chat" in head
    await client.aclose()


def test_goodput_by_phase_counts_each_phase_alone(workload):
    first, second = workload.until(4), workload.since(4)
    good = np.array([True] * len(first) + [False] * len(second))
    assert by_phase(good, [first, second]) == [pytest.approx(len(first) / 4), 0]


def test_the_report_has_a_column_for_each_phase_and_says_why_plans_changed(workload):
    scenario = load_scenario(SCENARIO).shortened(4, 2)
    changes = [Change(3.0, "tuner", "disaggregated, 1P 3D", "the traffic moved")]
    outcome = Outcome("trimtab", "p", np.ones(len(workload), dtype=bool), changes)
    shown = report(scenario, [workload.until(4), workload.since(4)], [outcome], 1).markdown()
    assert "the traffic moved" in shown
    assert "| policy | notes, " in shown


async def test_engines_that_are_no_profile_cannot_be_started(tmp_path):
    with pytest.raises(ScenarioError, match="differ from their profile"):
        async with live_stack(load_scenario("slow-network"), tmp_path):
            pass


def patient(scenario):
    return SloTable(classes=dict.fromkeys(scenario.slos.classes, Slo(ttft_ms=60_000, tpot_ms=10_000)))


@pytest.mark.timeout(240)
async def test_a_pinned_plan_serves_a_workload_over_real_processes(tmp_path):
    scenario = load_scenario(SCENARIO).shortened(3, 2)
    engines = msgspec.structs.replace(scenario.engines, count=2)
    scenario = msgspec.structs.replace(scenario, engines=engines)
    workload = generate(scenario, 5)
    plan = next(each for each in patterns(scenario.fleet) if each.pattern == DISAGGREGATED)
    async with live_stack(scenario, tmp_path) as stack:
        await stack.pin(fixed_plan(plan, scenario.fleet))
        client = Client(stack.url, stack.model, workload)
        good = (await client.run()).good(workload, patient(scenario))
        await client.aclose()
        assert (await stack.plans())[-1]["pattern"] == DISAGGREGATED
    assert good.all()
