"""Two real engines under one policy after another: what the figures are."""

import numpy as np
import pytest

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.live.load import Seen
from benchmarks.adapt.sglang.summary import PEERS, Run, goals, report
from benchmarks.adapt.sglang.traffic import PHASES, SLOS, phases
from tuner.plan import DATA_PARALLEL, DISAGGREGATED

PHASE_S = 120.0
PARTS = phases(PHASES, PHASE_S, 1)


def run(policy, *shares, seed=1):
    """A policy that serves such a share of each phase well, evenly over time."""
    good = [np.arange(len(part)) % 100 < 100 * share for part, share in zip(PARTS, shares, strict=True)]
    return Run(policy, seed, PARTS, np.concatenate(good), Seen.nothing_of(sum(map(len, PARTS))), 0.0, [])


def verdicts(*runs):
    return {goal.name.split(",")[0]: goal.met for goal in goals(runs, PHASE_S)}


def test_trimtab_must_beat_every_static_pattern_over_the_whole_and_each_peer_in_both_phases():
    statics = run(DATA_PARALLEL, 0.5, 1.0), run(DISAGGREGATED, 1.0, 0.1)
    peer = run(next(iter(PEERS)), 0.3, 0.9)
    met = verdicts(*statics, peer, run(TRIMTAB, 1.0, 1.0))
    assert all(met.values())
    met = verdicts(*statics, peer, run(TRIMTAB, 0.2, 0.9))
    assert not any(met.values())


def test_what_was_not_run_is_not_measured():
    met = verdicts(run(DATA_PARALLEL, 0.2, 1.0), run(TRIMTAB, 1.0, 1.0))
    assert met["goodput of the better peer's"] is None


def test_goodput_of_a_phase_counts_its_own_requests_after_the_moment():
    found = run(DATA_PARALLEL, 0.0, 1.0)
    assert found.phase(0) == 0
    late = PARTS[1].arrived_s >= 60
    assert found.phase(1, 60.0) == pytest.approx(late.sum() / (PHASE_S - 60))


def test_the_report_tells_each_policy_and_seed():
    runs = [run(DATA_PARALLEL, 0.5, 0.5, seed=seed) for seed in (1, 2)]
    shown = report(runs, PHASES, SLOS, PHASE_S, [1, 2], {}, {}).markdown()
    assert shown.count("| data_parallel |") == 3
    assert "answering" in shown


def test_each_seed_brings_other_requests_of_the_same_kind():
    other = phases(PHASES, PHASE_S, 2)
    assert len(other[0]) == len(PARTS[0])
    assert other[0].prompt_tokens.tolist() != PARTS[0].prompt_tokens.tolist()
