"""A link shared by its transfers, against hand-made cases and a slow model of the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.emulated.link import Link


def completions(link: Link) -> list[tuple[str, float]]:
    """Run the link dry."""
    told = []
    while (upcoming := link.next_completion()) is not None:
        told += [(flow_id, upcoming[1]) for flow_id in link.advance(upcoming[1])]
    return told


def test_a_lone_flow_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    link = Link(100.0, 0.5)
    link.start("a", 200, 10.0)
    assert link.next_completion() == ("a", 12.5)
    assert (link.advance(12.4), link.active) == ([], 1)
    assert (link.advance(12.5), link.active) == (["a"], 0)
    assert link.next_completion() is None


def test_two_flows_share_evenly_while_both_are_there() -> None:
    link = Link(100.0, 0.0)
    link.start("long", 300, 0.0)
    link.start("short", 100, 1.0)
    assert completions(link) == [("short", 3.0), ("long", 4.0)]


def test_a_cancelled_flow_leaves_its_share_to_the_others() -> None:
    link = Link(100.0, 0.0)
    link.start("a", 200, 0.0)
    link.start("b", 200, 0.0)
    assert link.cancel("b", 2.0)
    assert not link.cancel("b", 2.0)
    assert completions(link) == [("a", 3.0)]


def test_a_flow_past_its_last_byte_takes_no_share_and_can_still_be_cancelled() -> None:
    link = Link(100.0, 5.0)
    link.start("a", 100, 0.0)
    link.start("b", 100, 2.0)
    assert link.next_completion() == ("a", 6.0)
    assert link.cancel("a", 3.0)
    assert completions(link) == [("b", 8.0)]


def test_an_id_can_be_used_again_after_cancelling_it() -> None:
    link = Link(100.0, 0.0)
    link.start("a", 100, 0.0)
    link.start("b", 1000, 0.0)
    link.cancel("a", 1.0)
    link.start("a", 500, 1.0)
    assert completions(link) == [("a", 11.0), ("b", 15.5)]


def test_no_bytes_take_the_latency_alone() -> None:
    link = Link(100.0, 0.25)
    link.start("a", 0, 1.0)
    assert completions(link) == [("a", 1.25)]


def test_flows_that_end_together_are_told_in_the_order_of_their_start() -> None:
    link = Link(100.0, 0.0)
    for flow_id in "abc":
        link.start(flow_id, 100, 0.0)
    assert link.advance(99.0) == ["a", "b", "c"]


def test_an_id_under_way_and_a_negative_size_are_refused() -> None:
    link = Link(100.0, 1.0)
    link.start("a", 100, 0.0)
    with pytest.raises(ValueError, match="'a'"):
        link.start("a", 100, 0.5)
    link.advance(1.5)
    with pytest.raises(ValueError, match="'a'"):
        link.start("a", 100, 1.5)
    with pytest.raises(ValueError, match="negative"):
        link.start("b", -1, 1.5)


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        Link(0.0, 0.0)


flows = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=8)


def slow_model(starts: list[tuple[int, int]], bandwidth: float, latency_s: float) -> dict[str, float]:
    """Processor sharing from one event to the next, all flows looked at each time."""
    left = {str(i): float(nbytes) for i, (_, nbytes) in enumerate(starts)}
    at_s, done, active = 0.0, dict[str, float](), set[str]()
    joins = {str(i): float(start) for i, (start, _) in enumerate(starts)}
    while len(done) < len(starts):
        active |= {key for key, start in joins.items() if start <= at_s and key not in done}
        rate = bandwidth / max(1, len(active))
        upcoming = [start for start in joins.values() if start > at_s] + [at_s + left[key] / rate for key in active]
        until_s = min(upcoming)
        for key in list(active):
            left[key] -= rate * (until_s - at_s)
            if left[key] <= 1e-9:
                done[key] = until_s + latency_s
                active.discard(key)
        at_s = until_s
    return done


@given(flows, st.sampled_from([0.0, 0.5]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_it_agrees_with_a_slow_model(starts: list[tuple[int, int]], latency_s: float) -> None:
    link, told = Link(10.0, latency_s), dict[str, float]()

    def run_until(limit_s: float) -> None:
        while (upcoming := link.next_completion()) is not None and upcoming[1] <= limit_s:
            told.update(dict.fromkeys(link.advance(upcoming[1]), upcoming[1]))

    for i, (start_s, nbytes) in sorted(enumerate(starts), key=lambda entry: entry[1][0]):
        run_until(start_s)
        link.start(str(i), nbytes, float(start_s))
    run_until(float("inf"))
    assert link.active == 0
    assert told == pytest.approx(slow_model(starts, 10.0, latency_s), abs=1e-6)
