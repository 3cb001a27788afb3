"""The kernel in virtual time: what runs when and what it yields."""

from array import array

import pytest

from engines.emulated.kernel import Kernel
from tests.support.virtual_kernel import Virtual, count_up, make_profile, prompt


def test_an_idle_kernel_has_no_pass() -> None:
    assert Kernel(make_profile(), count_up).begin_pass(0.0) is None


def test_the_first_token_comes_with_the_end_of_the_prefill_and_the_others_one_a_step() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 50), max_tokens=3)
    run.run()
    assert run.tokens("a") == [1000, 1001, 1002]
    assert run.at_s("a") == pytest.approx([0.060, 0.081, 0.102])
    assert run.shape() == [(50, 0), (0, 1), (0, 1)]
    assert [done.kv_tokens for done in run.passes] == [0, 51, 52]


def test_timings_tell_queueing_prefill_and_decode_apart() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 64), max_tokens=1)
    run.generate("b", prompt(2, 40), max_tokens=2)
    run.run()
    timings = run.finished("b").timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == pytest.approx((0.074, 0.050, 0.021))
    assert (timings.prompt_tokens, timings.cached_tokens, timings.output_tokens) == (40, 0, 2)


def test_one_token_wanted_is_one_token_given_and_no_decode() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 10), max_tokens=1)
    run.run()
    assert (run.tokens("a"), run.shape()) == ([1000], [(10, 0)])


def test_a_long_prompt_is_prefilled_in_chunks_whose_context_adds_up() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 150), max_tokens=1)
    run.run()
    assert run.shape() == [(64, 0), (64, 0), (22, 0)]
    assert [done.prefill_context_tokens for done in run.passes] == [64 * 32, 64 * 96, 22 * 139]


def test_several_prompts_share_a_pass_and_the_last_one_is_cut() -> None:
    run = Virtual()
    for name, first in (("a", 1), ("b", 2), ("c", 3)):
        run.generate(name, prompt(first, 30), max_tokens=1)
    run.step()
    assert run.passes[0].prefill_tokens == 64
    assert (run.tokens("a"), run.tokens("b"), run.tokens("c")) == ([1000], [1000], [])
    assert run.kernel.load().pending_prefill_tokens == 26


def test_prefills_run_back_to_back_before_decodes_go_on() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 20), max_tokens=3)
    run.step()
    run.generate("b", prompt(2, 100), max_tokens=3)
    run.run()
    assert run.shape() == [(20, 0), (64, 0), (36, 0), (0, 2), (0, 2)]


def test_with_an_interval_decodes_run_between_prefill_passes() -> None:
    run = Virtual(prefill_decode_interval=2)
    run.generate("a", prompt(1, 20), max_tokens=10)
    run.step()
    run.generate("b", prompt(2, 100), max_tokens=1)
    for _ in range(7):
        run.step()
    assert run.shape() == [(20, 0), (0, 1), (0, 1), (64, 0), (0, 1), (0, 1), (36, 0), (0, 1)]


def test_an_interval_does_not_hold_up_prefills_while_nothing_decodes() -> None:
    run = Virtual(prefill_decode_interval=8)
    run.generate("a", prompt(1, 150), max_tokens=1)
    run.run()
    assert run.shape() == [(64, 0), (64, 0), (22, 0)]


def test_a_mixed_pass_prefills_and_decodes_and_costs_both() -> None:
    run = Virtual(mixed_chunk=True)
    run.generate("a", prompt(1, 20), max_tokens=3)
    run.step()
    run.generate("b", prompt(2, 100), max_tokens=1)
    run.run()
    assert run.shape() == [(20, 0), (64, 1), (36, 1)]
    assert run.passes[1].duration_s == pytest.approx(0.010 + 0.064 + 0.001)
    assert run.tokens("a") == [1000, 1001, 1002]


def test_no_more_requests_run_than_the_profile_allows() -> None:
    run = Virtual(max_running=2)
    for first in range(5):
        run.generate(str(first), prompt(first, 10), max_tokens=3)
    run.run()
    assert max(done.decode_batch for done in run.passes) == 2
    assert all(run.tokens(str(first)) == [1000, 1001, 1002] for first in range(5))


def test_begin_and_end_alternate() -> None:
    kernel = Kernel(make_profile(), count_up)
    with pytest.raises(RuntimeError):
        kernel.end_pass(0.0)
    kernel.submit_generation("a", prompt(1, 10), 1, 0.0, group=None)
    kernel.begin_pass(0.0)
    with pytest.raises(RuntimeError):
        kernel.begin_pass(0.0)


def test_the_token_chooser_sees_prompt_and_outputs_so_far() -> None:
    run = Virtual(lambda state: state.prompt[0] + len(state.outputs) * state.max_tokens)
    run.generate("a", array("I", [7, 8]), max_tokens=3)
    run.run()
    assert run.tokens("a") == [7, 10, 13]
