"""The kernel's context cache, and what it does when there is too little room."""

from array import array

import pytest

from engines.errors import BadRequest, ContextTooLong
from tests.support.virtual_kernel import Virtual, prompt


def test_a_repeated_prompt_prefills_only_its_last_token() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 50), max_tokens=1)
    run.run()
    run.generate("b", prompt(1, 50), max_tokens=1)
    run.run()
    assert run.shape() == [(50, 0), (1, 0)]
    assert run.finished("b").timings.cached_tokens == 49


def test_a_conversation_finds_the_answer_it_got_in_the_cache() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 50), max_tokens=5)
    run.run()
    run.generate("b", prompt(1, 50) + array("I", [1000, 1001, 1002, 1003, 1004, 7]), max_tokens=1)
    run.run()
    assert run.finished("b").timings.cached_tokens == 54  # the last output token was never fed back


def test_the_chunks_of_a_running_prefill_are_shared_already() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 100), max_tokens=9)
    run.step()
    run.generate("b", prompt(1, 60), max_tokens=1)
    run.run()
    assert run.finished("b").timings.cached_tokens == 59


def test_pending_tokens_leave_out_what_is_cached() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 50), max_tokens=1)
    run.run()
    run.generate("b", prompt(1, 60), max_tokens=1)
    assert run.kernel.load().pending_prefill_tokens == 10


def test_old_prefixes_make_room_for_new_requests() -> None:
    run = Virtual(kv_capacity_tokens=100)
    for first in range(1, 6):
        run.generate(str(first), prompt(first, 60), max_tokens=2)
        run.run()
    assert all(run.tokens(str(first)) == [1000, 1001] for first in range(1, 6))


def test_a_request_without_room_waits_until_another_is_through() -> None:
    run = Virtual(kv_capacity_tokens=200)
    run.generate("a", prompt(1, 100), max_tokens=30)
    run.generate("b", prompt(2, 100), max_tokens=30)
    run.step()
    run.step()
    assert (run.kernel.load().running, run.kernel.load().queued) == (1, 1)
    run.run()
    assert run.tokens("b") == [1000 + k for k in range(30)]
    assert min(run.at_s("b")) > max(run.at_s("a"))


def test_the_youngest_request_is_retracted_and_resumes_without_gap_or_repeat() -> None:
    run = Virtual(kv_capacity_tokens=300)
    run.generate("a", prompt(1, 60), max_tokens=150)
    run.generate("b", prompt(2, 60), max_tokens=150)
    run.run()
    assert run.kernel.retracted_total > 0
    assert run.tokens("a") == run.tokens("b") == [1000 + k for k in range(150)]
    assert max(run.at_s("a")) < max(run.at_s("b"))
    timings = run.finished("b").timings
    assert (timings.prompt_tokens, timings.cached_tokens, timings.output_tokens) == (60, 0, 150)


def test_a_request_that_fills_the_whole_cache_alone_is_served() -> None:
    run = Virtual(kv_capacity_tokens=100)
    run.generate("a", prompt(1, 40), max_tokens=60)
    run.run()
    assert len(run.tokens("a")) == 60


@pytest.mark.parametrize("length", [960, 1500])
def test_what_can_never_fit_is_refused_at_once(length: int) -> None:
    run = Virtual(kv_capacity_tokens=1000, context_length_tokens=4000)
    with pytest.raises(ContextTooLong, match="1000"):
        run.generate("a", prompt(1, length), max_tokens=50)
    assert run.kernel.load().queued == 0


@pytest.mark.parametrize(("tokens", "max_tokens"), [(prompt(1, 0), 5), (prompt(1, 5), 0)])
def test_nothing_to_do_is_a_bad_request(tokens: "array[int]", max_tokens: int) -> None:
    with pytest.raises(BadRequest):
        Virtual().generate("a", tokens, max_tokens)


def test_an_id_is_refused_while_it_is_in_use_and_free_afterwards() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 10))
    with pytest.raises(BadRequest, match="'a'"):
        run.generate("a", prompt(1, 10))
    run.run()
    run.generate("a", prompt(1, 10))
