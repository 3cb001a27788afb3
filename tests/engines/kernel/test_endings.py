"""Requests of the kernel that end early, and prefills for other engines."""

from array import array

import pytest

from engines.errors import BadRequest
from tests.support.virtual_kernel import Virtual, prompt


def test_a_finished_request_yields_no_more_and_leaves_its_kv_cached() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 50), max_tokens=100)
    for _ in range(3):
        run.step()
    timings = run.kernel.finish("a", run.now_s)
    assert timings is not None
    assert timings.output_tokens == 3
    assert timings.decode_s == pytest.approx(0.042)
    assert run.kernel.finish("a", run.now_s) is None
    assert run.step() is None
    assert run.kernel.load().kv_used_tokens == 0
    run.generate("b", prompt(1, 50) + array("I", [1000, 1001, 1002]), max_tokens=1)
    run.run()
    assert run.finished("b").timings.cached_tokens == 52


@pytest.mark.parametrize("passes_before", [0, 1, 2, 3])
def test_an_abort_frees_the_room_whatever_stage_it_meets(passes_before: int) -> None:
    run = Virtual()
    run.generate("a", prompt(1, 100), max_tokens=100)
    for _ in range(passes_before):
        run.step()
    assert run.kernel.abort("a", run.now_s)
    assert not run.kernel.abort("a", run.now_s)
    run.kernel.check()
    assert run.step() is None
    load = run.kernel.load()
    assert (load.running, load.queued, load.kv_used_tokens) == (0, 0, 0)


@pytest.mark.parametrize("passes_before", [0, 1, 2, 3])
def test_an_abort_during_a_pass_holds_for_that_pass(passes_before: int) -> None:
    run = Virtual()
    run.generate("a", prompt(1, 100), max_tokens=100)
    run.generate("b", prompt(2, 100), max_tokens=100)
    for _ in range(passes_before):
        run.step()
    told = len(run.tokens("a"))
    running = run.kernel.begin_pass(run.now_s)
    assert running is not None
    assert run.kernel.abort("a", run.now_s)
    run.kernel.check()
    run.events += run.kernel.end_pass(run.now_s + running.duration_s)
    run.kernel.check()
    assert len(run.tokens("a")) == told
    run.run()
    assert (len(run.tokens("a")), len(run.tokens("b"))) == (told, 100)
    assert run.kernel.load().kv_used_tokens == 0


def test_one_of_two_aborted_during_a_decode_while_a_third_is_half_prefilled() -> None:
    run = Virtual(prefill_decode_interval=1)
    run.generate("a", prompt(1, 10), max_tokens=20)
    run.generate("b", prompt(2, 10), max_tokens=20)
    run.step()
    run.generate("c", prompt(3, 100), max_tokens=2)
    run.step()
    run.step()
    running = run.kernel.begin_pass(run.now_s)
    assert running is not None
    assert (running.prefill_tokens, running.decode_batch, running.kv_tokens) == (0, 2, 24)
    run.kernel.abort("a", run.now_s)
    run.kernel.abort("c", run.now_s)
    run.kernel.check()
    run.events += run.kernel.end_pass(run.now_s)
    run.kernel.check()
    run.run()
    assert (len(run.tokens("a")), len(run.tokens("b")), run.tokens("c")) == (2, 20, [])


def test_a_prefill_is_told_and_pinned_until_it_is_released() -> None:
    run = Virtual(kv_capacity_tokens=200)
    run.kernel.submit_prefill("p", prompt(1, 100), 90, 0.0)
    run.run()
    event = run.prefilled("p")
    assert (event.cached_tokens, event.queue_s) == (0, 0.0)
    assert event.prefill_s == pytest.approx(0.110)
    assert run.kernel.load().kv_used_tokens == 90
    run.generate("a", prompt(2, 120), max_tokens=1)
    assert run.step() is None
    assert run.kernel.release_prefill("p", run.now_s)
    assert not run.kernel.release_prefill("p", run.now_s)
    run.run()
    assert run.tokens("a") == [1000]


def test_a_prefill_says_how_much_was_cached_and_how_long_it_queued() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 60), max_tokens=1)
    run.run()
    begin_s = run.now_s
    run.generate("b", prompt(2, 64), max_tokens=1)
    run.kernel.submit_prefill("p", prompt(1, 100), 90, begin_s)
    run.run()
    event = run.prefilled("p")
    assert event.cached_tokens == 60
    assert event.queue_s == pytest.approx(0.074)
    assert event.prefill_s == pytest.approx(event.at_s - begin_s)


def test_a_prefill_can_be_stopped_half_way() -> None:
    run = Virtual()
    run.kernel.submit_prefill("p", prompt(1, 200), 200, 0.0)
    run.step()
    assert run.kernel.abort("p", run.now_s)
    assert run.step() is None
    assert run.kernel.load().kv_used_tokens == 0
    run.kernel.check()


def test_a_prefill_and_a_generation_may_have_the_same_id() -> None:
    run = Virtual()
    run.kernel.submit_prefill("r", prompt(1, 50), 40, 0.0)
    run.generate("r", prompt(1, 50), max_tokens=2)
    run.run()
    assert run.prefilled("r").cached_tokens == 0
    assert run.tokens("r") == [1000, 1001]


@pytest.mark.parametrize("end", [0, -1, 51])
def test_a_prefill_outside_the_prompt_is_a_bad_request(end: int) -> None:
    with pytest.raises(BadRequest, match="50 tokens"):
        Virtual().kernel.submit_prefill("p", prompt(1, 50), end, 0.0)
