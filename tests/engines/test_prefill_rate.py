"""Passes of very different sizes, one engine: the rate is what a queue of prompts drains at."""

import pytest

from engines.prefill_rate import MIN_RATED_TOKENS, PrefillRate

PASS_S = 0.2
TOKEN_S = 0.001


@pytest.fixture
def rate() -> PrefillRate:
    return PrefillRate()


def prefill_s(tokens: int) -> float:
    return PASS_S + TOKEN_S * tokens


def test_nothing_is_known_before_the_first_pass(rate: PrefillRate) -> None:
    assert rate.tokens_per_s is None


def test_the_first_prefill_pass_sets_it(rate: PrefillRate) -> None:
    rate.on_pass(500, 0.5, 0)
    assert rate.tokens_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(MIN_RATED_TOKENS - 1, 0.1), (500, 0.0), (0, 0.1)])
def test_what_measures_nothing_does_not_count(rate: PrefillRate, tokens: int, seconds: float) -> None:
    rate.on_pass(tokens, seconds, 0)
    assert rate.tokens_per_s is None


def test_a_mix_of_long_and_short_passes_is_rated_at_what_all_of_it_takes(rate: PrefillRate) -> None:
    sizes = [80, 80, 600] * 40
    rates = []
    for tokens in sizes:
        rate.on_pass(tokens, prefill_s(tokens), 0)
        rates.append(rate.tokens_per_s or 0.0)
    # Whichever pass was the last: over one whole round of sizes.
    assert sum(rates[-3:]) / 3 == pytest.approx(sum(sizes) / sum(map(prefill_s, sizes)), rel=0.05)


def test_an_engine_that_became_slower_is_rated_so_after_some_passes(rate: PrefillRate) -> None:
    for seconds in [0.5] * 20 + [1.0] * 20:
        rate.on_pass(500, seconds, 0)
    assert rate.tokens_per_s == pytest.approx(500.0, rel=0.02)


def test_decode_passes_that_prompts_wait_for_make_prefill_slower(rate: PrefillRate) -> None:
    for _ in range(40):
        rate.on_pass(500, 0.5, 2)
        rate.on_pass(0, 0.25, 2)
        rate.on_pass(0, 0.25, 2)
    assert rate.tokens_per_s == pytest.approx(500.0, rel=0.02)


def test_decode_passes_that_no_prompt_waits_for_do_not(rate: PrefillRate) -> None:
    for _ in range(40):
        rate.on_pass(500, 0.5, 0)
        rate.on_pass(0, 0.25, 0)
    assert rate.tokens_per_s == pytest.approx(1000.0)
