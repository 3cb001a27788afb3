import numpy as np
import pytest

from tests.support.traffic import traffic
from tuner.drift import detect
from tuner.workload import concatenate

BEFORE = {"rate_rps": 20.0, "prompt_tokens": 1000.0, "output_tokens": 100.0}


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"rate_rps": 40.0}, "rate"),
        ({"rate_rps": 8.0}, "rate"),
        ({"prompt_tokens": 3000.0}, "prompt_tokens"),
        ({"prompt_tokens": 300.0}, "prompt_tokens"),
        ({"output_tokens": 300.0}, "output_tokens"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_jump_is_seen_within_twenty_seconds_and_placed_within_four(change, moved, seed):
    workload = concatenate([traffic(200, seed=seed, **BEFORE), traffic(20, seed=seed + 10, **(BEFORE | change))])
    found = detect(workload, 0.0)
    assert found is not None
    assert moved in found.moved
    assert abs(found.since_s - 200) <= 4


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 3.0])
def test_half_an_hour_of_noise_raises_no_alarm(cv):
    hour = traffic(1800, seed=5, cv=cv, **BEFORE)
    for now_s in range(10, 1800, 10):
        window = hour.until(now_s).since(max(0, now_s - 300))
        assert detect(window, 0.0) is None, f"alarm at {now_s} s"


def test_a_moment_that_is_a_quarter_busier_is_no_shift_however_many_requests_show_it():
    """Over so short a time every traffic has some; what is compared are rates, not counts over unlike times."""
    steady, busier = (
        traffic(span_s, seed=4, cv=0.1, **(BEFORE | {"rate_rps": rate})) for span_s, rate in ((120, 200), (5, 250))
    )
    assert detect(concatenate([steady, busier]), 0.0) is None


def test_what_happened_before_the_regime_does_not_count():
    workload = concatenate([traffic(100, seed=1, **BEFORE), traffic(100, seed=2, **(BEFORE | {"rate_rps": 60.0}))])
    assert detect(workload, 100.0) is None


def test_silence_after_traffic_is_a_shift_of_the_rate():
    workload = traffic(120, seed=1, **BEFORE)
    quiet = workload.take(workload.arrived_s < 90)
    found = detect(quiet, 0.0)
    assert found is not None
    assert found.moved == ["rate"]


def test_no_requests_at_all_are_no_shift():
    empty = traffic(60).take(np.zeros(len(traffic(60)), dtype=bool))
    assert detect(empty, 0.0) is None


def test_a_shift_of_the_class_mix_is_seen():
    steady = traffic(150, seed=3, **BEFORE)
    classes = np.zeros(len(steady), dtype=np.int64)
    late = steady.arrived_s > 130
    classes[late] = np.arange(late.sum()) % 2
    from dataclasses import replace

    found = detect(replace(steady, classes=("default", "batch"), slo_class=classes), 0.0)
    assert found is not None
    assert "class batch" in found.moved
