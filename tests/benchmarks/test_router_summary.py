"""From samples of the router benchmark to ratios, goals and tables."""

import pytest

from benchmarks.router.load import Measured
from benchmarks.router.summary import Sample, Samples, goals, report


def measured(chunks=20_000, errors=None, ttft_p99_ms=0.5):
    return Measured(
        window_s=1.0,
        requests=200,
        chunks=chunks,
        errors=errors or {},
        cpu_share=0.4,
        latency_ms=[1.0, 2.0],
        ttft_ms=[10.0, 11.0],
        added_ttft_ms=[0.1, ttft_p99_ms],
        added_chunk_us=[40.0, 100.0],
        gap_ms=[10.0, 11.0],
    )


def sample(target, number, cpu_us, scenario="c200", **changes):
    result = measured(**{key: changes.pop(key) for key in ("chunks", "errors", "ttft_p99_ms") if key in changes})
    half = None if cpu_us is None else cpu_us / 2
    return Sample(
        target=target, scenario=scenario, round=number, user_us=half, system_us=half, measured=result, **changes
    )


def goal(found, name):
    return next(each for each in found if each.name == name)


def test_ratios_are_taken_within_a_round_before_the_median():
    run = Samples(
        [
            *(sample("sglang-router", number, cpu_us) for number, cpu_us in enumerate((10, 100, 20))),
            *(sample("trimtab", number, cpu_us) for number, cpu_us in enumerate((5, 60, 30))),
        ]
    )
    assert run.ratio("trimtab", "c200", "sglang-router") == pytest.approx(0.6)
    assert run.value("trimtab", "c200", lambda each: each.cpu_us) == 30


def test_a_round_without_the_reference_gives_no_ratio():
    run = Samples([sample("trimtab", 0, 5), sample("sglang-router", 1, 10)])
    assert run.ratio("trimtab", "c200", "sglang-router") is None


def test_goals_compare_with_peers_of_the_same_run():
    run = Samples([sample("sglang-router", 0, 20), sample("haproxy", 0, 16), sample("trimtab", 0, 22, ttft_p99_ms=0.3)])
    found = goals(run)
    assert goal(found, "CPU per chunk, 200 streams, × sglang-router").met is False
    assert goal(found, "CPU per chunk, 200 streams, × haproxy").value == pytest.approx(1.375)
    assert goal(found, "added TTFT p99, 200 streams, ms").met is True
    assert goal(found, "CPU per request, small request, × sglang-router").met is None


def test_a_paced_scenario_that_lost_pace_is_marked_as_saturated():
    slow = report([sample("smg", 0, 30, chunks=18_000)], 1, {}, {}).markdown()
    assert "15.0/15.0 †" in slow
    assert "†" not in report([sample("smg", 0, 30, chunks=19_900)], 1, {}, {}).markdown()


def test_errors_and_failures_are_named_in_the_report():
    text = report(
        [
            sample("smg", 0, 30, errors={"gap in a stream": 2}),
            sample("smg", 1, 30, errors={"gap in a stream": 1}),
            Sample.failed("haproxy", "c200", 0, "ended"),
        ],
        1,
        {},
        {"trimtab": "not built"},
    ).markdown()
    assert "smg, c200: 3 × gap in a stream" in text
    assert "haproxy, c200: failed: ended" in text
    assert "skipped **trimtab**: not built" in text


@pytest.mark.parametrize(("share", "warned"), [(0.5, True), (0.02, False), (None, False)])
def test_a_busy_machine_is_named_as_a_reason_for_doubt(share, warned):
    text = report([sample("smg", 0, 30, elsewhere_share=share)], 1, {}, {}).markdown()
    assert ("busy with something else" in text) is warned
