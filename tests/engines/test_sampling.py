"""Which passes engines report."""

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
