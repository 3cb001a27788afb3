"""Which passes engines report."""

import itertools

import numpy as np
import pytest

from engines.sampling import DECODE_EVERY_S, DECODE_PASSES, PassSample


def test_each_pass_that_prefills_is_told() -> None:
    sample = PassSample()
    assert [sample.wants(10, 1.0) for _ in range(3)] == [True] * 3


def test_of_fast_decode_passes_one_in_a_few_is_told() -> None:
    sample = PassSample()
    told = [sample.wants(0, 1.0 + 1e-4 * number) for number in range(1 + 3 * DECODE_PASSES)]
    assert [number for number, wanted in enumerate(told) if wanted] == [0, 8, 16, 24]


def test_each_decode_pass_of_a_slow_engine_is_told() -> None:
    sample = PassSample()
    assert all(sample.wants(0, 1.0 + 1.001 * DECODE_EVERY_S * number) for number in range(10))


@pytest.mark.parametrize("mean_s", [0.02, 0.06])
def test_long_passes_are_told_no_more_often_than_short_ones(mean_s: float) -> None:
    passes_s = np.random.default_rng(1).exponential(mean_s, 20_000)
    began_s = itertools.accumulate(passes_s, initial=1.0)
    sample = PassSample()
    told_s = [wall_s for wall_s, begin_s in zip(passes_s, began_s, strict=False) if sample.wants(0, begin_s)]
    assert len(told_s) < 0.8 * len(passes_s)
    assert np.mean(told_s) == pytest.approx(passes_s.mean(), rel=0.05)
