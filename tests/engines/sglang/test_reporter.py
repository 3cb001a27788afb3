"""How long a pass took, as an engine reports it."""

import numpy as np
import pytest

from engines.records import PassRecord
from engines.sglang.reporter import Reporter
from engines.sglang.view import Computed, Identity, Pass
from engines.types import EngineLoad

IDENTITY = Identity("e0", "small", "agent", "epoch", ("nixl",))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def reporter() -> Reporter:
    clock = Clock()
    return Reporter(IDENTITY, 4, clock, clock)


def test_a_pass_lasts_from_its_launch_when_the_engine_was_idle_before(reporter: Reporter) -> None:
    reporter.on_pass(_prefill(101.0, 101.5))
    reporter.on_idle()
    reporter.on_pass(_prefill(110.0, 110.7))

    assert [each.wall_s for each in _told(reporter)] == pytest.approx([0.5, 0.7])


def test_a_pass_that_follows_another_lasts_from_the_end_of_that_one(reporter: Reporter) -> None:
    reporter.on_pass(_prefill(101.0, 101.5))
    reporter.on_pass(_prefill(101.6, 102.0))

    assert [each.wall_s for each in _told(reporter)] == pytest.approx([0.5, 0.5])


def test_passes_that_overlap_are_not_counted_twice(reporter: Reporter) -> None:
    reporter.on_pass(_prefill(101.0, 101.5))
    reporter.on_pass(_prefill(101.2, 102.0))

    assert reporter.totals.busy_prefill_s == pytest.approx(1.0)


def test_the_prefill_rate_is_that_of_passes_whoever_shares_them(reporter: Reporter) -> None:
    assert reporter.prefill_tokens_per_s is None
    two = [Computed(rid, 0, 100, through=True, aborted=False, cached_tokens=0, request=None) for rid in ("r", "s")]
    reporter.on_pass(Pass(101.0, 102.0, two, 0, 0, 0, 0))

    assert reporter.prefill_tokens_per_s == pytest.approx(200.0)


@pytest.mark.parametrize("mean_s", [0.02, 0.06])
def test_long_passes_are_told_no_more_often_than_short_ones(reporter: Reporter, mean_s: float) -> None:
    passes_s = np.random.default_rng(1).exponential(mean_s, 20_000)
    began_s = 101.0
    for wall_s in passes_s:
        reporter.on_pass(Pass(began_s, began_s + wall_s, [], 1, 10, 0, 0))
        began_s += wall_s

    told_s = [each.wall_s for each in _told(reporter)]
    assert len(told_s) < 0.8 * len(passes_s)
    assert np.mean(told_s) == pytest.approx(passes_s.mean(), rel=0.05)


def _prefill(launched_s: float, ended_s: float) -> Pass:
    done = Computed("r", 0, 8, through=True, aborted=False, cached_tokens=0, request=None)
    return Pass(launched_s, ended_s, [done], 0, 0, 0, 0)


def _told(reporter: Reporter) -> list[PassRecord]:
    return list(reporter.take(EngineLoad()).passes)
