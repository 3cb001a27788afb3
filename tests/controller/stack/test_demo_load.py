"""The built-in load."""

import itertools
import random

import pytest

from controller.cli.load import Mix
from controller.cli.up import LoadName
from controller.stack.demo_load import CHAT, CODE, MIXES, SHIFTING, SUMMARY, arrivals, gaps_s, requests

MIXED = MIXES["mixed"][0].kinds


def test_arrivals_come_at_the_rate_asked_for_and_not_evenly() -> None:
    gaps = list(itertools.islice(gaps_s(random.Random(1), rate=4.0), 5000))
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert min(gaps) < 0.01 < 1.0 < max(gaps)


def test_the_same_seed_sends_the_same_requests() -> None:
    first, again = (list(itertools.islice(requests(random.Random(7), MIXED), 20)) for _ in range(2))
    assert first == again


def test_a_mix_sends_every_kind_with_lengths_that_vary() -> None:
    sent = list(itertools.islice(requests(random.Random(1), MIXED), 300))
    assert {request.slo_class for request in sent} == {CHAT.slo_class, SUMMARY.slo_class, CODE.slo_class}
    assert len({request.max_tokens for request in sent}) > 50
    assert max(len(request.prompt.split()) for request in sent) > 2 * SUMMARY.prompt_words


def test_requests_of_one_conversation_share_their_beginning() -> None:
    sent = list(itertools.islice(requests(random.Random(1), (CHAT,)), 40))
    beginnings = {" ".join(request.prompt.split()[: CHAT.shared_words]) for request in sent}
    assert len(beginnings) == CHAT.conversations
    assert len({beginning[:100] for beginning in beginnings}) == CHAT.conversations


def test_shifting_traffic_goes_from_one_kind_to_the_next_and_begins_again() -> None:
    cycle_s = sum(phase.duration_s for phase in SHIFTING)
    now_s = 0.0
    for gap_s, request in arrivals(random.Random(3), SHIFTING, rate=2.0):
        now_s += gap_s
        if now_s > 2 * cycle_s:
            break
        into_s = now_s % cycle_s
        phase = next(phase for phase in SHIFTING if (into_s := into_s - phase.duration_s) < 0)
        assert request.slo_class in {kind.slo_class for kind in phase.kinds}


def test_shifting_traffic_keeps_the_rate_of_each_phase() -> None:
    first = SHIFTING[0]
    times_s = itertools.accumulate(gap_s for gap_s, _ in arrivals(random.Random(3), SHIFTING, rate=20.0))
    sent = sum(1 for _ in itertools.takewhile(lambda time_s: time_s < first.duration_s, times_s))
    assert sent == pytest.approx(20.0 * first.rate_factor * first.duration_s, rel=0.05)


def test_commands_offer_every_mix() -> None:
    assert {mix.value for mix in Mix} == set(MIXES) == {name.value for name in LoadName} - {"none"}
