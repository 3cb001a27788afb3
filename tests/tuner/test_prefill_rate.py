"""Prompts of very different lengths, one engine: the rate is what a queue of them drains at."""

import pytest

from tuner.prefill_rate import MIN_RATED_TOKENS, PrefillRate

PASS_S = 0.2
TOKEN_S = 0.001


@pytest.fixture
def rate():
    return PrefillRate()


def prefill_s(tokens):
    return PASS_S + TOKEN_S * tokens


def test_nothing_is_known_before_the_first_prompt(rate):
    assert rate.tokens_per_s is None


def test_the_first_prompt_sets_it(rate):
    rate.learn(500, 0.5)
    assert rate.tokens_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(MIN_RATED_TOKENS - 1, 0.1), (500, 0.0)])
def test_what_measures_nothing_does_not_count(rate, tokens, seconds):
    rate.learn(tokens, seconds)
    assert rate.tokens_per_s is None


def test_a_mix_of_long_and_short_prompts_is_rated_at_what_all_of_it_takes(rate):
    lengths = [80, 80, 600] * 40
    rates = []
    for tokens in lengths:
        rate.learn(tokens, prefill_s(tokens))
        rates.append(rate.tokens_per_s)
    # Whichever prompt was the last: over one whole round of lengths.
    assert sum(rates[-3:]) / 3 == pytest.approx(sum(lengths) / sum(map(prefill_s, lengths)), rel=0.05)


def test_an_engine_that_became_slower_is_rated_so_after_some_prompts(rate):
    for seconds in [0.5] * 20 + [1.0] * 20:
        rate.learn(500, seconds)
    assert rate.tokens_per_s == pytest.approx(500.0, rel=0.02)
