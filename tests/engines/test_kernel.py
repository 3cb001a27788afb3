"""The kernel in virtual time: what runs when, what it yields, and that no room for KV is ever lost."""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.emulated.kernel import Event, Finished, GenerationState, Kernel, Pass, Prefilled, Token
from engines.emulated.profile import Profile, load_profile
from engines.errors import BadRequest, ContextTooLong, Draining, NoKvRoom, ReservationGone
from engines.protocol import Config


def make_profile(**changes: Any) -> Profile:
    plain: dict[str, Any] = {
        "a_s": 0.010,
        "b_s_per_token": 0.001,
        "c_s_per_token2": 0.0,
        "d_s": 0.020,
        "e_s_per_sequence": 0.001,
        "f_s_per_kv_token": 0.0,
        "kv_capacity_tokens": 1000,
        "context_length_tokens": 1000,
        "chunked_prefill_tokens": 64,
        "max_running": 8,
    }
    return msgspec.structs.replace(load_profile("laptop"), **(plain | changes))


def count_up(state: GenerationState) -> int:
    """Output token k of any request is 1000 + k, so that a gap or a repeat shows."""
    return 1000 + len(state.outputs)


def prompt(first: int, length: int) -> "array[int]":
    return array("I", range(first * 10_000, first * 10_000 + length))


class Virtual:
    """A kernel under a clock that jumps from pass to pass."""

    def __init__(self, choose_token: Callable[[GenerationState], int] = count_up, **changes: Any) -> None:
        self.kernel = Kernel(make_profile(**changes), choose_token)
        self.now_s = 0.0
        self.passes: list[Pass] = []
        self.events: list[Event] = []

    def generate(self, request_id: str, tokens: "array[int]", max_tokens: int = 4, group: str | None = None) -> None:
        self.kernel.submit_generation(request_id, tokens, max_tokens, self.now_s, group=group)

    def step(self) -> Pass | None:
        running = self.kernel.begin_pass(self.now_s)
        if running is not None:
            self.now_s += running.duration_s
            self.passes.append(running)
            self.events += self.kernel.end_pass(self.now_s)
            self.kernel.check()
        return running

    def run(self) -> "Virtual":
        while self.step() is not None:
            pass
        return self

    def tokens(self, request_id: str) -> list[int]:
        return [e.token for e in self.events if isinstance(e, Token) and e.request_id == request_id]

    def at_s(self, request_id: str) -> list[float]:
        return [e.at_s for e in self.events if isinstance(e, Token) and e.request_id == request_id]

    def finished(self, request_id: str) -> Finished:
        (event,) = [e for e in self.events if isinstance(e, Finished) and e.request_id == request_id]
        return event

    def prefilled(self, request_id: str) -> Prefilled:
        (event,) = [e for e in self.events if isinstance(e, Prefilled) and e.request_id == request_id]
        return event

    def shape(self) -> list[tuple[int, int]]:
        return [(done.prefill_tokens, done.decode_batch) for done in self.passes]


# --- Passes, tokens and times


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


# --- The context cache


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


# --- Too little room


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


# --- Ending early


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


# --- Prefill for others


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


# --- Reservations


def test_a_received_prefix_saves_its_prefill() -> None:
    run = Virtual()
    reservation = run.kernel.reserve("r", prompt(1, 100), -1, 10.0, 0.0)
    assert (reservation.begin, reservation.end, reservation.tokens) == (0, 99, 99)
    assert run.kernel.load().kv_reserved_tokens == 99
    run.kernel.receive("r", 0, 99, 0.0)
    assert (run.kernel.load().kv_reserved_tokens, run.kernel.load().kv_used_tokens) == (0, 99)
    run.generate("r", prompt(1, 100), max_tokens=2)
    run.run()
    assert run.shape() == [(1, 0), (0, 1)]
    assert run.finished("r").timings.cached_tokens == 99
    assert run.kernel.load().kv_used_tokens == 0
    assert run.kernel.next_expiry_s() is None


def test_what_is_cached_is_pinned_and_not_reserved_again() -> None:
    run = Virtual(kv_capacity_tokens=200)
    run.generate("a", prompt(1, 60), max_tokens=1)
    run.run()
    reservation = run.kernel.reserve("r", prompt(1, 100), 90, 10.0, 0.0)
    assert (reservation.matched, reservation.tokens) == (60, 30)
    run.generate("b", prompt(2, 100), max_tokens=1)
    run.run()
    assert run.tokens("b") == [1000]
    run.kernel.receive("r", 60, 90, run.now_s)
    run.kernel.check()
    assert run.kernel.load().kv_used_tokens == 90


def test_a_prefix_that_is_wholly_cached_needs_no_bytes() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 60), max_tokens=1)
    run.run()
    reservation = run.kernel.reserve("r", prompt(1, 60), -1, 10.0, 0.0)
    assert (reservation.begin, reservation.end, reservation.received) == (59, 59, True)


def test_what_was_computed_here_meanwhile_is_not_kept_twice() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), 90, 10.0, 0.0)
    run.generate("a", prompt(1, 80), max_tokens=1)
    run.run()
    run.kernel.receive("r", 0, 90, run.now_s)
    run.kernel.check()
    assert run.kernel.release("r", run.now_s)
    assert run.kernel.load().kv_free_tokens == 1000


def test_no_room_is_said_at_once_with_a_time_to_come_back() -> None:
    run = Virtual(kv_capacity_tokens=200)
    run.kernel.reserve("r", prompt(1, 150), -1, 0.5, 0.0)
    with pytest.raises(NoKvRoom) as refusal:
        run.kernel.reserve("s", prompt(2, 150), -1, 0.5, 0.2)
    assert refusal.value.retry_after_s == pytest.approx(0.3)
    run.kernel.check()
    assert run.kernel.expire(0.5) == ["r"]
    run.kernel.reserve("s", prompt(2, 150), -1, 0.5, 0.5)


def test_a_reservation_dies_on_time_and_its_room_comes_back() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), -1, 2.0, 1.0)
    assert run.kernel.next_expiry_s() == 3.0
    assert run.kernel.expire(2.9) == []
    with pytest.raises(ReservationGone):
        run.kernel.receive("r", 0, 99, 3.0)
    assert run.kernel.expire(3.0) == ["r"]
    assert run.kernel.load().kv_free_tokens == 1000


@pytest.mark.parametrize("end_it", ["abort", "release", "drain"])
def test_a_reservation_given_up_takes_no_more_bytes(end_it: str) -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), -1, 2.0, 0.0)
    if end_it == "drain":
        run.kernel.set_draining(True)
    else:
        assert getattr(run.kernel, end_it)("r", 0.0)
    with pytest.raises(ReservationGone):
        run.kernel.receive("r", 0, 99, 0.1)
    assert run.kernel.load().kv_free_tokens == 1000


def test_bytes_may_come_twice_but_only_for_the_reserved_range() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), 90, 2.0, 0.0)
    for begin, end in ((1, 90), (0, 89), (0, 91)):
        with pytest.raises(BadRequest, match="reserved"):
            run.kernel.receive("r", begin, end, 0.1)
    run.kernel.receive("r", 0, 90, 0.1)
    run.kernel.receive("r", 0, 90, 0.2)
    run.kernel.check()


def test_a_reservation_does_not_expire_while_its_generation_queues() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), -1, 0.01, 0.0)
    run.kernel.receive("r", 0, 99, 0.0)
    run.generate("x", prompt(2, 200), max_tokens=1)
    run.generate("r", prompt(1, 100), max_tokens=1)
    run.step()
    assert (run.kernel.next_expiry_s(), run.kernel.expire(run.now_s)) == (None, [])
    run.run()
    assert run.finished("r").timings.cached_tokens == 99


def test_the_choices_of_one_request_share_its_reservation() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), -1, 1.0, 0.0)
    run.kernel.receive("r", 0, 99, 0.0)
    for choice in range(3):
        run.generate(f"r#{choice}", prompt(1, 100), max_tokens=2, group="r")
    run.run()
    assert all(run.finished(f"r#{choice}").timings.cached_tokens == 99 for choice in range(3))
    assert not run.kernel.release("r", run.now_s)


def test_a_groups_reservation_goes_with_the_last_choice_that_waits_for_it() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), -1, 1.0, 0.0)
    for choice in range(2):
        run.generate(f"r#{choice}", prompt(1, 100), max_tokens=2, group="r")
    run.kernel.abort("r#0", 0.0)
    assert run.kernel.load().kv_reserved_tokens == 99
    run.kernel.abort("r#1", 0.0)
    assert run.kernel.load().kv_reserved_tokens == 0


def test_a_generation_that_comes_before_its_bytes_uses_the_reserved_room_and_computes() -> None:
    run = Virtual(kv_capacity_tokens=110)
    run.kernel.reserve("r", prompt(1, 100), -1, 1.0, 0.0)
    run.generate("r", prompt(1, 100), max_tokens=5)
    run.run()
    assert len(run.tokens("r")) == 5
    with pytest.raises(ReservationGone):
        run.kernel.receive("r", 0, 99, run.now_s)


def test_reserving_again_replaces_the_reservation() -> None:
    run = Virtual()
    run.kernel.reserve("r", prompt(1, 100), -1, 1.0, 0.0)
    run.kernel.reserve("r", prompt(1, 100), 50, 1.0, 0.0)
    assert run.kernel.load().kv_reserved_tokens == 50


def test_a_queue_stuck_on_room_that_those_behind_its_head_hold_gets_it_back() -> None:
    run = Virtual(kv_capacity_tokens=200)
    run.kernel.reserve("r", prompt(1, 120), 100, 1.0, 0.0)
    run.kernel.receive("r", 0, 100, 0.0)
    run.generate("a", prompt(2, 150), max_tokens=2)
    run.generate("r", prompt(1, 120), max_tokens=2)
    run.run()
    assert run.tokens("a") == run.tokens("r") == [1000, 1001]


@pytest.mark.parametrize("end", [0, 100, 101, -100, -200])
def test_a_split_outside_the_prompt_is_a_bad_request(end: int) -> None:
    with pytest.raises(BadRequest, match=str(end)):
        Virtual().kernel.reserve("r", prompt(1, 100), end, 1.0, 0.0)


def test_a_reservation_must_last_and_fit() -> None:
    kernel = Virtual().kernel
    with pytest.raises(BadRequest, match="ttl_s"):
        kernel.reserve("r", prompt(1, 100), -1, 0.0, 0.0)
    with pytest.raises(ContextTooLong):
        kernel.reserve("r", prompt(1, 1000), -1, 1.0, 0.0)


# --- Control


def test_a_draining_kernel_refuses_new_work_and_finishes_the_old() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 10))
    run.kernel.set_draining(True)
    with pytest.raises(Draining):
        run.generate("b", prompt(1, 10))
    with pytest.raises(Draining):
        run.kernel.submit_prefill("p", prompt(1, 10), 5, 0.0)
    with pytest.raises(Draining):
        run.kernel.reserve("r", prompt(1, 10), -1, 1.0, 0.0)
    assert len(run.run().tokens("a")) == 4
    assert run.kernel.load().draining
    run.kernel.set_draining(False)
    run.generate("b", prompt(1, 10))


def test_knobs_change_the_very_next_pass() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 300), max_tokens=1)
    run.step()
    now_in_force = run.kernel.config(Config(chunked_prefill_tokens=200))
    assert now_in_force == Config(chunked_prefill_tokens=200, prefill_decode_interval=0)
    run.run()
    assert run.shape() == [(64, 0), (200, 0), (36, 0)]


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (Config(chunked_prefill_tokens=15, prefill_decode_interval=5), "chunked_prefill_tokens is 15"),
        (Config(chunked_prefill_tokens=128, prefill_decode_interval=65), "prefill_decode_interval is 65"),
        (Config(prefill_decode_interval=-1), "prefill_decode_interval is -1"),
    ],
)
def test_a_bad_knob_is_named_and_nothing_is_set(wanted: Config, complaint: str) -> None:
    kernel = Virtual().kernel
    with pytest.raises(BadRequest, match=complaint):
        kernel.config(wanted)
    assert kernel.config(Config()) == Config(chunked_prefill_tokens=64, prefill_decode_interval=0)


def test_the_load_counts_what_waits_runs_and_is_held() -> None:
    run = Virtual()
    run.generate("a", prompt(1, 50), max_tokens=5)
    run.step()
    run.step()
    run.generate("b", prompt(2, 30), max_tokens=5)
    load = run.kernel.load()
    assert (load.running, load.queued, load.pending_prefill_tokens) == (1, 1, 30)
    assert (load.kv_used_tokens, load.kv_reserved_tokens, load.kv_capacity_tokens) == (51, 0, 1000)


# --- Any order of calls

IDS = st.sampled_from(["r0", "r1", "r2", "r3"])
GROUPS = st.sampled_from([None, "r0", "r1"])
PROMPTS = st.tuples(st.integers(1, 3), st.integers(1, 90), st.integers(0, 2)).map(
    lambda drawn: prompt(drawn[0], drawn[1]) + array("I", [drawn[2]] * 5)
)
EXPECTED = (BadRequest, ContextTooLong, Draining, NoKvRoom, ReservationGone)


class AnyOrder(RuleBasedStateMachine):
    """Every verb at any time, in little room: the books must balance after each, and nothing may stay held."""

    @initialize(
        capacity=st.integers(100, 300), mixed=st.booleans(), interval=st.integers(0, 2), chunk=st.sampled_from([16, 64])
    )
    def start(self, capacity: int, mixed: bool, interval: int, chunk: int) -> None:
        profile = make_profile(
            kv_capacity_tokens=capacity,
            mixed_chunk=mixed,
            prefill_decode_interval=interval,
            chunked_prefill_tokens=chunk,
            max_running=3,
        )
        self.kernel = Kernel(profile, count_up)
        self.now_s = 0.0
        self.running: Pass | None = None
        self.live: dict[str, int] = {}

    def attempt(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except EXPECTED:
            return False
        return True

    @rule(request_id=IDS, tokens=PROMPTS, max_tokens=st.integers(1, 60), group=GROUPS)
    def generate(self, request_id: str, tokens: "array[int]", max_tokens: int, group: str | None) -> None:
        submit = self.kernel.submit_generation
        if self.attempt(lambda: submit(request_id, tokens, max_tokens, self.now_s, group=group)):
            assert request_id not in self.live
            self.live[request_id] = 0

    @rule(request_id=IDS, tokens=PROMPTS, end=st.integers(1, 95))
    def prefill(self, request_id: str, tokens: "array[int]", end: int) -> None:
        self.attempt(lambda: self.kernel.submit_prefill(request_id, tokens, end, self.now_s))

    @rule(request_id=IDS)
    def release_prefill(self, request_id: str) -> None:
        self.kernel.release_prefill(request_id, self.now_s)

    @rule(request_id=IDS)
    def abort(self, request_id: str) -> None:
        self.kernel.abort(request_id, self.now_s)
        self.live.pop(request_id, None)

    @rule(request_id=IDS)
    def finish(self, request_id: str) -> None:
        timings = self.kernel.finish(request_id, self.now_s)
        told = self.live.pop(request_id, None)
        assert (timings.output_tokens if timings else None) == told

    @rule(request_id=IDS, tokens=PROMPTS, end=st.integers(-95, 95), received=st.booleans())
    def reserve(self, request_id: str, tokens: "array[int]", end: int, received: bool) -> None:
        def transfer() -> None:
            reservation = self.kernel.reserve(request_id, tokens, end, 0.5, self.now_s)
            if received:
                self.kernel.receive(request_id, reservation.begin, reservation.end, self.now_s)

        self.attempt(transfer)

    @rule(request_id=IDS, begin=st.integers(0, 20), end=st.integers(1, 95))
    def receive(self, request_id: str, begin: int, end: int) -> None:
        self.attempt(lambda: self.kernel.receive(request_id, begin, end, self.now_s))

    @rule(request_id=IDS)
    def release(self, request_id: str) -> None:
        self.kernel.release(request_id, self.now_s)

    @rule(wait_s=st.sampled_from([0.0, 0.1, 0.6]))
    def expire(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.kernel.expire(self.now_s)

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.kernel.set_draining(on)

    @precondition(lambda self: self.running is None)
    @rule()
    def begin_pass(self) -> None:
        self.running = self.kernel.begin_pass(self.now_s)

    @precondition(lambda self: self.running is not None)
    @rule()
    def end_pass(self) -> None:
        assert self.running is not None
        self.now_s += self.running.duration_s
        for event in self.kernel.end_pass(self.now_s):
            self.tell(event)
        self.running = None

    @precondition(lambda self: self.running is None)
    @rule(passes=st.integers(1, 10))
    def run_passes(self, passes: int) -> None:
        for _ in range(passes):
            self.begin_pass()
            if self.running is not None:
                self.end_pass()

    def tell(self, event: Event) -> None:
        if isinstance(event, Token):
            assert event.token == 1000 + self.live[event.request_id]
            self.live[event.request_id] += 1
        elif isinstance(event, Finished):
            assert event.timings.output_tokens == self.live.pop(event.request_id)

    @invariant()
    def the_books_balance(self) -> None:
        self.kernel.check()

    def teardown(self) -> None:
        if not hasattr(self, "kernel"):
            return
        if self.running is not None:
            self.end_pass()
        self.now_s += 1.0
        self.kernel.expire(self.now_s)
        self.run_dry()
        for request_id in ("r0", "r1", "r2", "r3"):
            self.kernel.release_prefill(request_id, self.now_s)
        self.run_dry()
        self.kernel.check()
        load = self.kernel.load()
        assert self.live == {}
        assert (load.running, load.queued, load.pending_prefill_tokens) == (0, 0, 0)
        assert (load.kv_used_tokens, load.kv_reserved_tokens) == (0, 0)

    def run_dry(self) -> None:
        """Prefills that come to be pinned meanwhile are released, as the server does once the bytes are sent."""
        self.begin_pass()
        while self.running is not None:
            self.end_pass()
            self.begin_pass()


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestAnyOrder = AnyOrder.TestCase
