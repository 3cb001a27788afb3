"""Made-up prompts share what the workload says, and answers go on in the session's stream."""

from array import array
from dataclasses import dataclass, field

import pytest

from tuner.twin.prompts import Streams, choose_token, prefix_hashes


@dataclass
class Answering:
    prompt: "array[int]"
    outputs: "array[int]" = field(default_factory=lambda: array("I"))
    request_id: str = "r"
    group: str | None = None
    max_tokens: int = 100


def shared(first: "array[int]", second: "array[int]") -> int:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


@pytest.fixture
def streams():
    return Streams()


def test_prompts_of_a_session_extend_one_another(streams):
    short, long = streams.prompt(1, 0, 0, 100), streams.prompt(1, 0, 0, 250)
    assert long[:100] == short


def test_the_next_prompt_holds_the_answer(streams):
    state = Answering(streams.prompt(1, 9, 50, 100))
    for _ in range(30):
        state.outputs.append(choose_token(state))
    assert streams.prompt(1, 9, 50, 200)[:130] == state.prompt + state.outputs


def test_sessions_share_their_root_and_no_more(streams):
    assert shared(streams.prompt(1, 9, 64, 100), streams.prompt(2, 9, 64, 100)) == 64
    assert shared(streams.prompt(1, 8, 64, 100), streams.prompt(2, 9, 64, 100)) == 0
    assert shared(streams.prompt(1, 9, 0, 100), streams.prompt(2, 9, 0, 100)) == 0


def test_blocks_are_equal_as_far_as_prompts_are(streams):
    first, second = streams.blocks(1, 9, 300, 1000), streams.blocks(2, 9, 300, 1000)
    assert len(first) == 7
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True] + [False] * 5
    assert streams.blocks(1, 9, 300, 2000)[:7] == first


def test_short_prompts_have_no_sketch(streams):
    assert prefix_hashes(streams.blocks(1, 0, 0, 100)) is None
