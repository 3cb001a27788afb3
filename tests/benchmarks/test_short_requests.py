"""Load that a small model on one core can serve."""

import numpy as np
import pytest

from benchmarks.short_requests import Lengths, Traffic, bounds_at_pace
from tuner.slo import Slo, SloTable

TRAFFIC = Traffic("t", rate_rps=2.0, prompt=Lengths(100, 0.5, 20, 400), output=Lengths(30, 0.5, 4, 90))


def test_requests_come_at_the_rate_and_in_order():
    found = TRAFFIC.over(500.0, np.random.default_rng(1))
    assert found.rate_rps == pytest.approx(2.0)
    assert (np.diff(found.arrived_s) >= 0).all()
    assert found.arrived_s[-1] < 500.0


def test_lengths_stay_within_bounds_around_their_median():
    found = TRAFFIC.over(2000.0, np.random.default_rng(1))
    assert found.prompt_tokens.min() >= 20
    assert found.prompt_tokens.max() <= 400
    assert np.median(found.prompt_tokens) == pytest.approx(100, rel=0.1)
    assert np.median(found.output_tokens) == pytest.approx(30, rel=0.1)


def test_the_same_seed_gives_the_same_requests_and_none_shares_anything():
    one, other = (TRAFFIC.over(60.0, np.random.default_rng(4)) for _ in range(2))
    assert (one.prompt_tokens == other.prompt_tokens).all()
    assert len(set(one.session.tolist())) == len(one)
    assert not one.root_tokens.any()


def test_slower_engines_are_asked_for_less_in_more_time():
    assert TRAFFIC.at_pace(2.0).rate_rps == 1.0
    slos = bounds_at_pace(SloTable(classes={"default": Slo(ttft_ms=100, tpot_ms=10)}), 2.0)
    assert (slos.classes["default"].ttft_ms, slos.classes["default"].tpot_ms) == (200, 20)
