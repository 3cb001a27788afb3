"""The built-in load."""

import itertools
import random

import pytest

from controller.stack.demo_load import CHAT, CODE, MIXES, SUMMARY, gaps_s, requests


def test_arrivals_come_at_the_rate_asked_for_and_not_evenly() -> None:
    gaps = list(itertools.islice(gaps_s(random.Random(1), rate=4.0), 5000))
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert min(gaps) < 0.01 < 1.0 < max(gaps)


def test_the_same_seed_sends_the_same_requests() -> None:
    first, again = (list(itertools.islice(requests(random.Random(7), MIXES["mixed"]), 20)) for _ in range(2))
    assert first == again


def test_a_mix_sends_every_kind_with_lengths_that_vary() -> None:
    sent = list(itertools.islice(requests(random.Random(1), MIXES["mixed"]), 300))
    assert {request.slo_class for request in sent} == {CHAT.slo_class, SUMMARY.slo_class, CODE.slo_class}
    assert len({request.max_tokens for request in sent}) > 50
    assert max(len(request.prompt.split()) for request in sent) > 2 * SUMMARY.prompt_words


def test_requests_of_one_conversation_share_their_beginning() -> None:
    sent = list(itertools.islice(requests(random.Random(1), (CHAT,)), 40))
    beginnings = {" ".join(request.prompt.split()[: CHAT.shared_words]) for request in sent}
    assert len(beginnings) == CHAT.conversations
    assert len({beginning[:100] for beginning in beginnings}) == CHAT.conversations
