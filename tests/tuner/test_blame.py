import pytest

from engines.records import Outcome, RequestRecord
from tuner.blame import NOT_COUNTED, Bound, Cause, misses
from tuner.slo import Slo

SLO = Slo(ttft_ms=1000, tpot_ms=50)


def record(outcome: Outcome = Outcome.OK, **more: object) -> RequestRecord:
    given: dict[str, object] = {
        "request_id": "r1",
        "router_id": "router",
        "slo_class": "default",
        "arrived_at_s": 0.0,
        "status": 200,
        "api": "chat",
        "stream": True,
        "pattern": "balanced",
        "plan_version": 1,
        "e2e_s": 5.0,
        "ttft_s": 0.5,
        "tpot_s": 0.01,
    }
    return RequestRecord(outcome=outcome, **(given | more))  # type: ignore[arg-type]


def test_a_request_within_its_bounds_misses_nothing() -> None:
    assert misses(record(), SLO) == ()
    assert misses(record(tpot_s=None), SLO) == ()


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"queue_s": 1.2, "prefill_s": 0.5, "transfer_s": 0.3}, Cause.QUEUE),
        ({"queue_s": 0.5, "prefill_s": 1.2, "transfer_s": 0.3}, Cause.PREFILL),
        ({"queue_s": 0.3, "prefill_s": 0.5, "transfer_s": 1.2}, Cause.TRANSFER),
        ({"queue_s": 1.0, "prefill_s": 1.0}, Cause.QUEUE),
        ({"queue_s": 0.1, "prefill_s": 0.2}, Cause.QUEUE),
        ({"queue_s": 0.1, "prefill_s": 0.2, "attempts": 2}, Cause.ERROR),
        ({"decode_s": 1.9, "prefill_s": 0.1, "stream": False}, Cause.DECODE),
        ({"decode_s": 1.9, "prefill_s": 1.5, "stream": True}, Cause.PREFILL),
        ({}, Cause.QUEUE),
    ],
    ids=str,
)
def test_a_late_first_token_is_put_down_to_the_largest_part_of_its_time(parts: dict[str, object], cause: Cause) -> None:
    assert misses(record(ttft_s=2.0, **parts), SLO) == ((Bound.TTFT, cause),)


def test_slow_output_is_put_down_to_decoding_unless_the_stream_broke_off() -> None:
    assert misses(record(tpot_s=0.06), SLO) == ((Bound.TPOT, Cause.DECODE),)
    assert misses(record(tpot_s=0.06, resumed=1), SLO) == ((Bound.TPOT, Cause.ERROR),)


def test_both_bounds_can_be_missed_each_for_its_own_cause() -> None:
    late = record(ttft_s=3.0, transfer_s=2.5, tpot_s=0.06)
    assert misses(late, SLO) == ((Bound.TTFT, Cause.TRANSFER), (Bound.TPOT, Cause.DECODE))


def test_a_request_that_was_given_up_missed_the_bound_that_it_was_waiting_for() -> None:
    waiting = record(Outcome.GAVE_UP, ttft_s=None, e2e_s=9.0, queue_s=5.0)
    assert misses(waiting, SLO) == ((Bound.TTFT, Cause.QUEUE),)
    prefilling = record(Outcome.GAVE_UP, ttft_s=None, e2e_s=9.0, queue_s=1.0, prefill_s=7.0)
    assert misses(prefilling, SLO) == ((Bound.TTFT, Cause.PREFILL),)


@pytest.mark.parametrize("outcome", [each for each in Outcome if each not in (Outcome.OK, Outcome.GAVE_UP)])
def test_what_was_refused_or_failed_missed_both_and_what_the_client_did_does_not_count(outcome: Outcome) -> None:
    cause = Cause.REFUSED if outcome in (Outcome.SHED, Outcome.NO_ROOM) else Cause.ERROR
    expected = () if outcome in NOT_COUNTED else ((Bound.TTFT, cause), (Bound.TPOT, cause))
    assert misses(record(outcome), SLO) == expected
