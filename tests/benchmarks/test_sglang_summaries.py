"""What the SGLang benchmarks make of their samples."""

import pytest

from benchmarks.sglang_interference import summary as interference
from benchmarks.sglang_interference.streams import Stream
from benchmarks.sglang_transfer import summary as transfer
from tests.support.infos import engine_info

INFO = engine_info(engine_id="e1", kind="cpu")


def sample(**given) -> transfer.Sample:
    usual = {
        "tokens": 100,
        "bytes": 2_304_000,
        "transfer_s": 0.010,
        "prefill_s": 0.2,
        "prep_recv_s": 0.002,
        "remote_send_s": 0.215,
        "start_generate_s": 0.104,
        "generation_s": 0.1,
        "cached_tokens": 100,
    }
    return transfer.Sample(**(usual | given))


def test_control_time_is_what_neither_computes_nor_moves_bytes():
    raw = {100: transfer.Raw(nixl_s=[0.008, 0.009, 0.5], copy_s=[0.001])}
    (row,) = transfer.report([sample()], raw, INFO, 1, {}).results
    # 2 + 215 + 104 in calls, less 200 and 100 of compute, less 9 for the bytes alone.
    assert row["control_ms"] == pytest.approx(12.0)


def test_the_share_of_nixl_is_of_the_worst_size():
    raw = {100: transfer.Raw(nixl_s=[0.009], copy_s=[0.001]), 200: transfer.Raw(nixl_s=[0.004], copy_s=[0.001])}
    samples = [sample(), sample(tokens=200, bytes=4_608_000, transfer_s=0.008)]
    goals = {goal.name: goal for goal in transfer.report(samples, raw, INFO, 1, {}).goals}
    share = goals["MB/s of a transfer over MB/s of raw NIXL, worst size"]
    assert (share.value, share.met) == (pytest.approx(0.5), False)


def test_a_size_that_was_not_measured_is_reported_as_such():
    raw = {100: transfer.Raw(nixl_s=[0.009], copy_s=[0.001])}
    report = transfer.report([], raw, INFO, 1, {})
    assert [goal.met for goal in report.goals] == [None, None]
    assert "–" in report.markdown()


def arrival(stack: str, worst_gap_s: float) -> interference.Sample:
    return interference.Sample(stack=stack, round=0, quiet_gaps_s=[0.1, 0.1, 0.3], worst_gap_s=worst_gap_s, ttft_s=4.0)


def test_the_goal_compares_disaggregated_with_data_parallel():
    samples = [arrival("data_parallel", 4.0), arrival("disaggregated", 0.5)]
    report = interference.report(samples, [], ("data_parallel", "disaggregated"), 1, {}, {})
    (goal,) = report.goals
    assert (goal.value, goal.met) == (pytest.approx(0.125), True)
    assert report.results[0]["quiet_gap_ms"] == pytest.approx(100.0)


def test_a_stack_that_cannot_run_is_named_with_the_reason():
    report = interference.report([arrival("data_parallel", 4.0)], [], ("data_parallel", "x"), 1, {}, {"x": "no luck"})
    assert "skipped **x**: no luck" in report.markdown()
    assert report.goals[0].met is None


def test_a_pause_counts_where_it_reaches_into_the_span():
    stream = Stream(None, {})
    stream.token_at_s = [0.0, 1.0, 5.0, 6.0, 7.0]
    assert list(stream.gaps_s(2.0, 4.0)) == [4.0]
    assert list(stream.gaps_s(0.5, 5.5)) == [1.0, 4.0, 1.0]
