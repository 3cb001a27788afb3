"""Published evaluations simulated again: data, claims both ways, and a tiny run from end to end."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper import plots
from benchmarks.paper.claims import near
from benchmarks.paper.curves import Curves
from benchmarks.paper.goodput import IDLE_RPS, PRECISION, Goodput, drawn, highest_rate
from benchmarks.paper.goodput import set_up as set_up_system
from benchmarks.paper.goodput_claims import claims as goodput_claims
from benchmarks.paper.microserving import LostRequests, measured, set_up, sonnets
from benchmarks.paper.microserving_claims import claims as microserving_claims
from benchmarks.paper.published import (
    METRICS,
    PATTERNS,
    find_profile,
    load_distserve,
    load_microserving,
    load_reasons,
)
from benchmarks.paper.run import DISTSERVE, PaperOptions, run_paper
from benchmarks.paper.tables import claim_section
from benchmarks.paper.world import FewestRunning, make_plan, simulated, simulated_from_prefill
from engines.types import Role
from tuner.plan import DATA_PARALLEL, DISAGGREGATED
from tuner.slo import BOOTSTRAP_SLOS
from tuner.twin.types import Ending


@pytest.fixture(scope="module")
def microserving():
    return load_microserving()


@pytest.fixture(scope="module")
def distserve():
    return load_distserve()


@pytest.fixture
def published(microserving):
    return Curves(microserving.rates_rps, microserving.published)


def with_curve(curves, pattern, metric, values):
    return Curves(curves.rates_rps, {**curves.values, pattern: {**curves.values[pattern], metric: values}})


def by_key(claims):
    return {each.key: each.reproduced for each in claims}


def goodput(kind, rate_rps, slo_scale=1.0, as_published=()):
    return Goodput("chat", kind, kind, 1, rate_rps, 1.0, 1.0, 1.0, slo_scale, [], [], as_published)


def two(comparison, split_rps=2.0, baseline_rps=1.0, off=0.0):
    """The published pair of systems; the baseline attains what was published, and so much less."""
    curve = comparison.published.baseline_attained
    attained = [] if curve is None else [share - off for share in curve.shares]
    return {
        "disaggregated": goodput("disaggregated", split_rps),
        "baseline": goodput("baseline", baseline_rps, as_published=attained),
    }


def test_every_published_curve_has_a_value_for_each_rate(microserving):
    assert set(microserving.published) == set(PATTERNS)
    for metrics in microserving.published.values():
        assert {name: len(curve) for name, curve in metrics.items()} == dict.fromkeys(METRICS, 6)


def test_every_profile_that_is_named_is_there(microserving, distserve):
    for hardware in microserving.hardware.values():
        assert [find_profile(name).kv_layout.tensor_parallel for name in (hardware.tp4, hardware.tp8)] == [4, 8]
    for comparison in distserve.comparisons:
        assert {"disaggregated", "baseline", "same_kernels", "chunked"} <= {each.kind for each in comparison.systems}
        assert all(system.gpus >= 1 for system in comparison.systems)


def test_reasons_are_given_for_claims_that_exist(microserving, distserve, published):
    known = {each.key for each in microserving_claims(microserving, published)}
    reasons = load_reasons()
    for hardware in microserving.hardware:
        assert set(reasons[hardware]) <= known
    of_distserve = {
        each.key for comparison in distserve.comparisons for each in goodput_claims(comparison, two(comparison))
    }
    assert set(reasons[DISTSERVE]) <= of_distserve


@pytest.mark.parametrize("name", ["sharegpt", "humaneval", "longbench"])
def test_drawn_lengths_have_the_published_means(distserve, name):
    dataset = distserve.lengths[name]
    work = drawn(dataset, 50_000, seed=1)
    assert work.prompt_tokens.mean() == pytest.approx(dataset.mean_prompt_tokens, rel=0.03)
    assert work.output_tokens.mean() == pytest.approx(dataset.mean_output_tokens, rel=0.05)
    assert (work.prompt_tokens + work.output_tokens).max() <= dataset.most_tokens


def test_one_in_ten_chats_is_too_long_for_vllm_to_prefill_in_time_on_one_gpu(distserve):
    """That is what the published curve begins with at its lowest rates."""
    profile, work = find_profile("vllm-a100-tp1-opt-13b"), drawn(distserve.lengths["sharegpt"], 20_000, seed=1)
    alone_s = np.array([profile.prefill_s(tokens, tokens**2 / 2) for tokens in work.prompt_tokens.tolist()])
    assert (alone_s <= 0.25).mean() == pytest.approx(0.905, abs=0.01)


def test_the_published_curves_bear_out_the_claims_but_for_the_p99(microserving, published):
    missed = [key for key, reproduced in by_key(microserving_claims(microserving, published)).items() if not reproduced]
    assert missed == ["disaggregation P99"]


def test_a_pattern_out_of_its_place_is_a_ranking_not_reproduced(microserving, published):
    slow = [value + (1.0 if rate == 4.0 else 0.0) for rate, value in zip(*_jct(published, "balanced"), strict=True)]
    found = by_key(microserving_claims(microserving, with_curve(published, "balanced", "jct_mean_s", slow)))
    assert not found["ranking at 4"]
    assert found["ranking at 3.2"]


def test_patterns_published_within_a_pixel_may_come_in_either_order(microserving, published):
    swapped = [value + (0.05 if rate == 2.4 else 0.0) for rate, value in zip(*_jct(published, "tp8"), strict=True)]
    assert by_key(microserving_claims(microserving, with_curve(published, "tp8", "jct_mean_s", swapped)))[
        "ranking at 2.4"
    ]


def test_a_ttft_that_does_not_explode_is_told(microserving, published):
    calm = with_curve(published, "disaggregated", "ttft_mean_s", [0.3, 0.3, 0.3, 0.4, 0.4, 0.5])
    found = by_key(microserving_claims(microserving, calm))
    assert not found["exploding TTFT"]
    assert not found["balanced TTFT"]


def test_a_tpot_that_grows_is_not_flat(microserving, published):
    steep = with_curve(published, "disaggregated", "tpot_mean_s", [0.013, 0.014, 0.015, 0.016, 0.018, 0.020])
    found = by_key(microserving_claims(microserving, steep))
    assert not found["flat TPOT"]
    assert not found["growing TPOT"]


def test_a_crossing_is_where_straight_lines_meet():
    curves = Curves([1.0, 2.0, 3.0], {"a": {"m": [1.0, 2.0, 4.0]}, "b": {"m": [2.0, 2.5, 3.0]}})
    assert curves.crossing_rps("m", "a", "b") == pytest.approx(2 + 0.5 / 1.5)
    assert curves.crossing_rps("m", "b", "a") is None


def test_near_is_the_same_both_ways_and_knows_no_negatives():
    assert near(1.24, 1.0)
    assert near(1.0, 1.24)
    assert not near(1.26, 1.0)
    assert not near(-0.1, 0.1)


def test_goodput_is_found_within_its_precision():
    assert highest_rate(lambda rate: 1.0 if rate <= 1.7 else 0.5, 0.9) == pytest.approx(1.7, rel=PRECISION)
    assert highest_rate(lambda rate: 1.0 if rate <= 0.05 else 0.5, 0.9) == pytest.approx(0.05, rel=PRECISION)


def test_a_system_that_misses_its_bounds_when_idle_has_no_goodput():
    tried = []
    assert highest_rate(lambda rate: tried.append(rate) or 0.89, 0.9) == 0.0
    assert tried == [IDLE_RPS]


def test_a_gain_is_reproduced_if_it_is_one_and_near(distserve):
    comparison = distserve.comparisons[0]

    def found(split_rps, baseline_rps, off=0.0):
        return by_key(goodput_claims(comparison, two(comparison, split_rps, baseline_rps, off)))

    assert found(2.3, 0.5)[f"{comparison.name} rate gain"]
    assert found(2.3, 0.5)[f"{comparison.name} baseline"]
    assert not found(2.3, 1.5)[f"{comparison.name} rate gain"]
    assert not found(2.3, 0.0)[f"{comparison.name} rate gain"]
    assert not found(2.3, 0.5)[f"{comparison.name} SLO gain"]
    assert found(2.3, 0.5, off=0.04)[f"{comparison.name} curve"]
    assert not found(2.3, 0.5, off=0.06)[f"{comparison.name} curve"]


def test_what_is_not_reproduced_is_told_with_its_reason(microserving, published):
    calm = with_curve(published, "disaggregated", "ttft_mean_s", [0.3, 0.3, 0.3, 0.4, 0.4, 0.5])
    claims = [each for each in microserving_claims(microserving, calm) if each.key == "exploding TTFT"]
    notes = claim_section("t", claims, {"exploding TTFT": "the engine is too fast"}).notes
    assert "0 of 1 reproduced" in notes[0]
    assert notes[1] == f"Not reproduced, the engine is too fast: {claims[0].says}."


def test_data_parallel_goes_to_the_engine_with_the_fewest_requests(microserving):
    fleet, plan = set_up(microserving, microserving.hardware["served"], "data_parallel")
    world = FewestRunning(fleet, plan, BOOTSTRAP_SLOS)
    for engine, inflight in zip(world.engines, (3, 1), strict=True):
        engine.own_inflight = inflight
    world.plan_for_arrival()
    assert [engine.view.role for engine in world.engines] == [Role.PREFILL, Role.MIXED]


def test_with_the_first_token_from_prefill_the_hand_off_moves_from_ttft_to_tpot(distserve):
    comparison = distserve.comparisons[0]
    fleet, roles = set_up_system(comparison.systems[0])
    work, plan = drawn(distserve.lengths["sharegpt"], 6, seed=2), make_plan(DISAGGREGATED, roles)
    early, late = simulated_from_prefill(work, fleet, plan), simulated(work, fleet, plan)
    assert (early.ttft_s < late.ttft_s).all()
    assert (early.tpot_s > late.tpot_s).all()
    gaps = work.output_tokens - 1
    assert early.ttft_s + gaps * early.tpot_s == pytest.approx(late.ttft_s + gaps * late.tpot_s)


def test_overhead_is_added_to_ttft_and_jct_alone(microserving):
    fleet, plan = set_up(microserving, microserving.hardware["served"], "balanced")
    timeline = simulated(sonnets(microserving, 2.0, 12, seed=1), fleet, plan)
    bare, late = measured(timeline, 2, 0.0), measured(timeline, 2, 0.5)
    added = {name: late[name] - bare[name] for name in METRICS}
    assert added == pytest.approx({name: 0.0 if "tpot" in name else 0.5 for name in METRICS})


def test_requests_without_an_answer_are_not_averaged_away(microserving):
    fleet, _ = set_up(microserving, microserving.hardware["served"], "data_parallel")
    timeline = simulated(sonnets(microserving, 2.0, 4, seed=1), fleet, make_plan(DATA_PARALLEL, {}))
    lost = replace(timeline, ending=np.array([Ending.OK, Ending.OK, Ending.NO_ROOM, Ending.OK], dtype=np.int8))
    with pytest.raises(LostRequests, match="1 of 4"):
        measured(lost, 0, 0.0)


def test_without_matplotlib_the_plots_are_skipped_and_all_else_is_reported(tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(plots, "draw", missing)
    options = PaperOptions(3, (1.6, 4.0, 5.6), requests=8, seeds=1, goodput_requests=6, plots=tmp_path / "plots")
    report = run_paper(options)
    assert "matplotlib" in report.skipped["plots"]
    told = report.markdown()
    assert "LLM MicroServing on MLC-LLM as served" in told
    assert "| chat OPT-13B: disaggregated | 3 |" in told
    assert len(report.headline) == 2
    groups = {each.get("group") for each in json.loads(report.json())["results"]}
    assert groups == {None, "served", "independent", DISTSERVE}


def test_plots_are_small_pictures(tmp_path, microserving, distserve, published):
    pytest.importorskip("matplotlib")
    found = [
        replace(goodput(system.kind, 1.0), comparison=comparison.name)
        for comparison in distserve.comparisons
        for system in comparison.systems
    ]
    files = plots.draw(
        tmp_path / "made", microserving, dict.fromkeys(microserving.hardware, published), distserve, found
    )
    assert len(files) == 3
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size < 80_000


def _jct(curves, pattern):
    return curves.rates_rps, curves.values[pattern]["jct_mean_s"]
