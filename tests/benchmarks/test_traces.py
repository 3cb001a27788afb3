"""Traces as workloads: what is read, what is kept as statistics, what is made of those, and how it is scaled."""

import json

import numpy as np
import pytest

from benchmarks.traces.catalog import load_traces
from benchmarks.traces.cells import Cell, base_of, course_of, digest
from benchmarks.traces.like import like
from benchmarks.traces.read import TraceError, read_trace
from benchmarks.traces.scale import BEGIN_S, scaled
from benchmarks.traces.sessions import BLOCK_TOKENS, kept_tokens, sessions_of, shared_tokens
from benchmarks.traces.slos import LEVELS, idle, slos_of
from benchmarks.traces.statistics import BIN_S, counts, load_statistics, statistics_of
from tuner.workload import Workload

SEED = 3
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
NAMES = tuple(load_traces())
MOONCAKE = "mooncake-conversation"


@pytest.fixture
def azure(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    return file


def mooncake(folder, *requests, name="mooncake.jsonl"):
    """A file with requests of (milliseconds, prompt tokens, block ids)."""
    lines = [
        json.dumps({"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": ids})
        for at, tokens, ids in requests
    ]
    file = folder / name
    file.write_text("\n".join(lines))
    return file


def test_azures_requests_come_at_their_times_and_share_nothing(azure):
    found = read_trace(azure, SEED)
    assert found.arrived_s == pytest.approx([0.0, 0.5, 60.0])
    assert found.prompt_tokens.tolist() == [4808, 3180, 110]
    assert found.output_tokens.tolist() == [10, 8, 27]
    assert len(set(found.session)) == 3
    assert not found.root_tokens.any()


def test_mooncakes_requests_are_spread_over_the_step_that_their_times_are_rounded_to(tmp_path):
    requests = [(3000 * step, 600, [0, 100 * step + at]) for step in range(4) for at in range(50)]
    found = read_trace(mooncake(tmp_path, *requests), SEED)
    assert len(set(found.arrived_s)) == 200
    assert counts(found.arrived_s, 12, 3.0).tolist() == pytest.approx([50, 50, 50, 50], abs=2)
    assert set(found.root_tokens) == {BLOCK_TOKENS}


@pytest.mark.parametrize("text", ["when,what\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n"])
def test_a_file_that_is_no_trace_is_named(tmp_path, text):
    file = tmp_path / "odd.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=r"odd\.csv"):
        read_trace(file, SEED)


def test_a_request_with_fewer_blocks_than_its_length_asks_for_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"mooncake\.jsonl"):
        read_trace(mooncake(tmp_path, (0, 5000, [0, 1])), SEED)


def test_a_prompt_that_goes_on_from_the_whole_blocks_of_another_is_its_next_turn():
    ids = [[0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 5, 6]]
    assert sessions_of(ids, np.array([1100, 1900, 2400])).tolist() == [0, 0, 0]


def test_prompts_with_no_more_than_the_root_in_common_are_sessions_of_their_own():
    assert sessions_of([[0, 1], [0, 2], [0]], np.array([1024, 1024, 100])).tolist() == [0, 1, 2]


def test_what_leaves_an_earlier_prompt_before_its_end_begins_a_session():
    ids = [[0, 1, 2, 3], [0, 1, 9]]
    assert sessions_of(ids, np.array([2048, 1536])).tolist() == [0, 1]


def test_a_turn_goes_on_from_the_latest_prompt_of_its_session_only():
    ids = [[0, 1], [0, 1, 2], [0, 1, 3]]
    assert sessions_of(ids, np.array([1024, 1536, 1536])).tolist() == [0, 0, 1]


def test_shared_tokens_are_those_of_blocks_that_came_before():
    ids, tokens = [[0, 1, 2], [0, 1, 3], [0, 1, 2]], np.array([1500, 1500, 1400])
    assert shared_tokens(ids, tokens) == 1024 + 1400


def test_a_workload_keeps_what_sessions_and_the_root_share(tmp_path):
    file = mooncake(tmp_path, (0, 1100, [0, 1, 2]), (30_000, 1700, [0, 1, 2, 3]), (60_000, 900, [0, 9]))
    # The next turn also finds the answer of 7 tokens.
    assert kept_tokens(read_trace(file, SEED)) == 1107 + 512


def test_mooncakes_sessions_keep_nearly_all_that_its_blocks_share():
    found = load_statistics(MOONCAKE)
    assert found.kept_share == pytest.approx(found.shared_share, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_generated_load_has_the_rate_over_time_the_lengths_and_the_sharing_of_the_trace(name):
    statistics = load_statistics(name)
    made = like(statistics, SEED)
    assert len(made) == pytest.approx(statistics.requests, rel=0.08)
    again = statistics_of(made, load_traces()[name])
    for field in ("p90_prompt_tokens", "p90_output_tokens"):
        assert getattr(again, field) == pytest.approx(getattr(statistics, field), rel=0.15)
    assert again.cv == pytest.approx(statistics.cv, rel=0.15)
    assert again.root_tokens == statistics.root_tokens
    bins = min(len(again.sessions_per_bin), len(statistics.sessions_per_bin))
    minutes = [np.add.reduceat(each.sessions_per_bin[:bins], np.arange(0, bins, 6)) for each in (again, statistics)]
    assert np.corrcoef(*minutes)[0, 1] > 0.7 or max(minutes[1]) < 1.6 * np.mean(minutes[1])
    kept = kept_tokens(made) / made.prompt_tokens.sum()
    assert kept == pytest.approx(statistics.kept_share or 0, abs=0.04)


def test_the_same_seed_gives_the_same_load():
    statistics = load_statistics(MOONCAKE)
    one, same, other = (like(statistics, seed) for seed in (1, 1, 2))
    assert digest(one) == digest(same) != digest(other)


def test_statistics_know_turns_and_how_prompts_grow(tmp_path):
    file = mooncake(tmp_path, (0, 1100, [0, 1, 2]), (30_000, 1700, [0, 1, 2, 3]), (60_000, 900, [0, 9]))
    found = statistics_of(read_trace(file, SEED), load_traces()[MOONCAKE])
    assert found.turns == [0.5, 0.5]
    assert set(found.added_tokens) == {600}
    assert min(found.pauses_s) == pytest.approx(30, abs=3)
    assert found.requests == 3


def test_the_first_prompts_of_a_session_are_not_its_later_ones(tmp_path):
    file = mooncake(tmp_path, (0, 1100, [0, 1, 2]), (30_000, 1700, [0, 1, 2, 3]), (60_000, 900, [0, 9]))
    found = statistics_of(read_trace(file, SEED), load_traces()[MOONCAKE])
    assert (min(found.first_tokens), max(found.first_tokens)) == (900, 1100)


@pytest.fixture(scope="module")
def whole():
    return like(load_statistics(MOONCAKE), SEED)


@pytest.mark.parametrize("rate_rps", [1.0, 3.0, 40.0])
def test_a_slice_is_thinned_or_laid_over_itself_to_a_rate(whole, rate_rps):
    found = scaled(whole, 600, rate_rps, SEED)
    assert found.span_s == 600
    assert found.rate_rps == pytest.approx(rate_rps, rel=0.1)
    assert found.arrived_s.max() < 600


def test_fleets_of_all_sizes_get_the_same_tokens_an_engine(whole):
    tokens = [scaled(whole, 600, 2.0 * engines, SEED).prompt_tokens.sum() / engines for engines in (4, 16, 64)]
    assert tokens == pytest.approx([np.mean(tokens)] * 3, rel=0.1)


def test_copies_are_other_users(whole):
    found = scaled(whole, 600, 20.0, SEED)
    own = whole.since(BEGIN_S).until(600)
    assert len(set(found.root)) == np.ceil(20.0 / own.rate_rps)
    assert not set(found.session[found.root == 0]) & set(found.session[found.root == 1])
    assert kept_tokens(found) / found.prompt_tokens.sum() == pytest.approx(
        kept_tokens(own) / own.prompt_tokens.sum(), abs=0.03
    )


def test_the_rate_keeps_its_course():
    """Of the trace that has bursts of minutes and pauses between them."""
    whole = like(load_statistics("azure-code"), SEED)
    minutes = [
        counts(each.arrived_s, 600, 60) for each in (whole.since(BEGIN_S).until(600), scaled(whole, 600, 100, SEED))
    ]
    assert np.corrcoef(*minutes)[0, 1] > 0.9


def test_a_trace_that_ends_before_the_slice_is_refused(azure):
    with pytest.raises(ValueError, match="nothing arrives"):
        scaled(read_trace(azure, SEED), 60, 1.0, SEED)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_multiples_of_what_the_90th_percentile_request_takes_alone(name):
    trace, statistics = load_traces()[name], load_statistics(name)
    ttft_s, tpot_s = idle(trace, statistics.p90_prompt_tokens, statistics.p90_output_tokens)
    for level, slowdown in LEVELS.items():
        slo = slos_of(trace, statistics, level).classes["default"]
        assert slo.ttft_ms == pytest.approx(1e3 * slowdown.ttft * ttft_s, abs=5)
        assert slo.tpot_ms == pytest.approx(1e3 * slowdown.tpot * tpot_s, abs=0.05)


def test_every_trace_has_a_rate_for_every_level_and_says_whose_it_is():
    for name, trace in load_traces().items():
        assert set(trace.rates_rps) == set(LEVELS)
        statistics = load_statistics(name)
        assert (statistics.source, statistics.licence) == (trace.source, trace.licence)
        assert len(statistics.sessions_per_bin) == np.ceil(statistics.span_s / BIN_S)


def test_without_the_file_load_is_generated_and_with_it_the_trace_is_taken(tmp_path):
    assert base_of("azure-code", SEED, None).generated
    assert base_of("azure-code", SEED, tmp_path).generated
    (tmp_path / load_traces()["azure-code"].file).write_text(AZURE)
    found = base_of("azure-code", SEED, tmp_path)
    assert not found.generated
    assert len(found.workload) == 3


def test_requests_that_fit_no_engine_are_left_out_and_counted(tmp_path):
    name = load_traces()[MOONCAKE].file
    mooncake(tmp_path, (0, 1100, [0, 1]), (30_000, 131_072, list(range(256))), name=name)
    found = base_of(MOONCAKE, SEED, tmp_path)
    assert (found.skipped, found.workload.prompt_tokens.tolist()) == (1, [1100])


def test_every_policy_of_a_cell_sees_the_same_arrivals():
    cell = Cell("azure-conversation", 4, "tight", 60.0)
    assert digest(course_of(cell, 1, None).workload) == digest(course_of(cell, 1, None).workload)
    assert digest(course_of(cell, 1, None).workload) != digest(course_of(cell, 2, None).workload)


def test_a_workload_s_digest_depends_on_every_column(whole):
    first = whole.take(slice(0, 10))
    for name in ("prompt_tokens", "session", "root_tokens"):
        changed = Workload(**{**columns(first), name: getattr(first, name) + 1})
        assert digest(changed) != digest(first)


def columns(workload):
    return {name: getattr(workload, name) for name in Workload.__slots__}
