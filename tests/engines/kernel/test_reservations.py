"""Room that the kernel holds for KV from elsewhere."""

import pytest

from engines.errors import BadRequest, ContextTooLong, NoKvRoom, ReservationGone
from tests.support.virtual_kernel import Virtual, prompt


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
