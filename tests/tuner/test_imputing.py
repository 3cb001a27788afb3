"""Answers that have not ended, imputed from those that have."""

import numpy as np
import pytest

from tuner.imputing import highest_outputs, with_outputs
from tuner.rows import OK, OUTCOMES, Rows, blank

NOW_S = 1000.0
TTFT_S = 0.5
TPOT_S = 0.05
LEFT = OUTCOMES.index("client_left")


def served(arrived_s, outputs, ttft_s=TTFT_S, prompt=100.0) -> Rows:
    """Requests as a window shows them now: whole where their answer is through, open otherwise."""
    rows = blank(len(arrived_s))
    rows["arrived_s"], rows["prompt_tokens"] = arrived_s, prompt
    e2e_s = ttft_s + TPOT_S * (np.asarray(outputs) - 1)
    whole = rows["arrived_s"] + e2e_s <= NOW_S
    for name, values in (("ttft_s", ttft_s), ("tpot_s", TPOT_S), ("output_tokens", outputs), ("e2e_s", e2e_s)):
        rows[name] = np.where(whole, values, np.nan)
    rows["ending"] = np.where(whole, OK, rows["ending"])
    return rows


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("queue_growth", [0.0, 0.5])
def test_a_young_window_does_not_take_answers_for_short(seed: int | None, queue_growth: float):
    """After 20 s, hardly an answer of more than 400 tokens can have ended, and more are waiting all the time."""
    rng = np.random.default_rng(1)
    arrived_s = np.sort(NOW_S - rng.uniform(0, 20, 3000))
    outputs = np.round(rng.lognormal(np.log(150), 0.6, 3000))
    rows = served(arrived_s, outputs, ttft_s=TTFT_S + queue_growth * (arrived_s - NOW_S + 20))
    seen = with_outputs(rows, NOW_S, None if seed is None else np.random.default_rng(seed))
    whole = rows["ending"] == OK
    assert outputs[whole].mean() < 0.75 * outputs.mean()
    assert seen.mean() == pytest.approx(outputs.mean(), rel=0.15)


def test_an_open_answer_is_longer_than_what_it_must_have_by_now():
    rows = served(np.array([NOW_S - 50.0] * 200 + [NOW_S - 20.5]), np.array([20] * 100 + [600] * 100 + [10_000]))
    assert with_outputs(rows, NOW_S)[-1] == 600


def test_an_answer_longer_than_any_before_goes_on_for_as_long_as_another():
    rows = served(np.array([NOW_S - 50.0] * 100 + [NOW_S - 100.5]), np.array([20] * 100 + [10_000]))
    assert with_outputs(rows, NOW_S)[-1] == 2000 + 20


def test_what_a_client_that_left_had_got_is_the_least_of_its_answer():
    rows = served(np.full(101, NOW_S - 90.0), np.array([20] * 50 + [500] * 50 + [30]))
    rows["ending"][-1] = LEFT
    assert with_outputs(rows, NOW_S)[-1] == 500


def test_answers_follow_the_prompt():
    prompts = np.concatenate([np.full(100, 100.0), np.full(100, 8000.0), [120.0, 7000.0]])
    outputs = np.concatenate([np.full(100, 10), np.full(100, 300), [10_000, 10_000]])
    arrived_s = np.concatenate([np.full(200, NOW_S - 90.0), np.full(2, NOW_S)])
    assert with_outputs(served(arrived_s, outputs, prompt=prompts), NOW_S)[-2:].tolist() == [10, 300]


def test_draws_keep_the_spread_of_answers():
    outputs = np.concatenate([np.tile([10, 1000], 200), np.full(400, 9999)])
    arrived_s = np.concatenate([np.full(400, NOW_S - 90.0), np.full(400, NOW_S)])
    for rng in (None, np.random.default_rng(5)):
        drawn = with_outputs(served(arrived_s, outputs), NOW_S, rng)[400:]
        assert set(drawn) == {10, 1000}
        assert (drawn == 1000).mean() == pytest.approx(0.5, abs=0.08)


def test_without_any_answer_there_is_a_guess():
    rows = served(np.full(3, NOW_S - 1.0), np.full(3, 9999))
    assert (with_outputs(rows, NOW_S) == 128).all()
    assert (highest_outputs(rows) > 128).all()
    assert len(with_outputs(blank(0), NOW_S)) == 0


def test_hardly_any_answer_is_longer_than_the_highest():
    outputs = np.concatenate([np.arange(1, 201), np.full(50, 9999)])
    arrived_s = np.concatenate([np.full(200, NOW_S - 90.0), np.full(50, NOW_S)])
    high = highest_outputs(served(arrived_s, outputs))
    assert (high[:200] == outputs[:200]).all()
    assert (high[200:] > 20).all()
