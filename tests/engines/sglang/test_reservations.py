"""Reservations: no slot is lost and none is promised twice, whatever happens in whatever order."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.errors import BadRequest, NoKvRoom, ReservationGone, TransferFailed
from engines.sglang.messages import pack_tokens
from engines.sglang.reservations import CLAIM_S, Reservations

CAPACITY = 32


@pytest.fixture
def held(cache):
    return cache(CAPACITY)


@pytest.fixture
def stopped():
    return []


@pytest.fixture
def reservations(held, stopped):
    numbers = iter(range(1000))
    return Reservations(held, stopped.append, lambda: f"n{next(numbers)}")


def open_one(reservations, request_id="r", tokens=10, start=0, ttl_s=30.0, now_s=0.0):
    ids = pack_tokens(range(start, start + tokens))
    return reservations.open(request_id, ids, tokens, tokens, ttl_s, now_s, 0)


def test_room_is_held_until_it_is_given_up(reservations, held):
    open_one(reservations)
    assert (held.held, reservations.tokens) == (10, 10)
    assert reservations.release("r") is True
    assert reservations.release("r") is False
    assert (held.held, reservations.tokens, held.locks.total()) == (0, 0, 0)


def test_without_room_nothing_is_held(reservations, held):
    open_one(reservations, "a", 20)
    with pytest.raises(NoKvRoom) as refused:
        open_one(reservations, "b", 20, start=100)
    assert refused.value.retry_after_s
    assert (held.held, held.locks.total()) == (20, 1)


def test_room_that_running_requests_need_is_not_given_away(reservations):
    with pytest.raises(NoKvRoom):
        reservations.open("r", pack_tokens(range(20)), 20, 20, 30.0, 0.0, spare_tokens=13)
    reservations.open("r", pack_tokens(range(20)), 20, 20, 30.0, 0.0, spare_tokens=12)


def test_what_is_cached_is_not_reserved_again(reservations, held):
    held.insert(pack_tokens(range(6)), 0, b"", held.allocate(6, 0))
    found = open_one(reservations)
    assert (found.matched, found.tokens) == (6, 4)


def test_what_was_received_is_cached_and_stays_while_reserved(reservations, held):
    found = open_one(reservations)
    reservations.begin_write(found, "agent", "s", 0.0)
    reservations.receive(found)
    assert found.received
    assert (held.held, reservations.tokens, reservations.writing) == (0, 0, 0)
    held.evict(CAPACITY)
    assert held.match(found.ids)[0] == 10
    reservations.release("r")
    held.evict(CAPACITY)
    assert held.match(found.ids)[0] == 0


def test_only_the_right_nonce_before_its_time_is_found(reservations):
    found = open_one(reservations, ttl_s=5.0)
    assert reservations.find("r", found.nonce, 4.9) is found
    for request_id, nonce, now_s in (("r", "other", 0.0), ("x", found.nonce, 0.0), ("r", found.nonce, 5.0)):
        with pytest.raises(ReservationGone):
            reservations.find(request_id, nonce, now_s)


def test_reserving_again_replaces(reservations, held):
    first = open_one(reservations)
    second = open_one(reservations)
    assert held.held == 10
    with pytest.raises(ReservationGone):
        reservations.find("r", first.nonce, 0.0)
    assert reservations.find("r", second.nonce, 0.0) is second


def test_a_second_writer_is_refused_until_the_first_has_stopped(reservations):
    found = open_one(reservations)
    reservations.begin_write(found, "a", "s1", 0.0)
    with pytest.raises(TransferFailed):
        reservations.begin_write(found, "a", "s2", 0.0)
    reservations.sender_stopped("a", "s1")
    reservations.begin_write(found, "a", "s2", 0.0)


def test_slots_being_written_come_back_only_when_their_sender_has_stopped(reservations, held, stopped):
    found = open_one(reservations)
    reservations.begin_write(found, "a", "s", 0.0)
    reservations.release("r")
    assert stopped == [found]
    assert (held.held, reservations.writing) == (10, 1)
    reservations.sender_stopped("a", "s")
    assert (held.held, reservations.writing, held.locks.total()) == (0, 0, 0)


def test_a_dead_sender_holds_nothing_beyond_the_reservations_time(reservations, held):
    found = open_one(reservations, ttl_s=20.0)
    reservations.begin_write(found, "a", "s", 0.0)
    assert reservations.expire(19.9) == 0
    assert reservations.expire(20.0) == 1
    assert held.held == 0


def test_a_dead_sender_of_a_given_up_reservation_holds_nothing_for_long(reservations, held):
    found = open_one(reservations, ttl_s=20.0)
    reservations.begin_write(found, "a", "s", 0.0)
    reservations.release("r")
    reservations.expire(20.0)
    assert (held.held, len(reservations)) == (0, 0)


@pytest.mark.parametrize(("now_s", "write_for_s"), [(0.0, 19.0), (15.0, 4.5), (19.0, 0.9), (20.0, 0.0), (30.0, 0.0)])
def test_no_write_may_begin_shortly_before_the_end(reservations, now_s, write_for_s):
    assert open_one(reservations, ttl_s=20.0).write_for_s(now_s) == pytest.approx(write_for_s)


def test_a_generation_keeps_what_it_waits_for_and_gives_empty_room_back(reservations, held):
    received = open_one(reservations, "got", 5, ttl_s=1.0)
    reservations.receive(received)
    open_one(reservations, "empty", 5, start=100)
    reservations.claim("got", 0.0)
    reservations.claim("empty", 0.0)
    reservations.claim("unknown", 0.0)
    assert held.held == 0
    assert reservations.expire(CLAIM_S - 0.1) == 0
    with pytest.raises(BadRequest, match="already generating"):
        open_one(reservations, "got", 5)
    assert reservations.expire(CLAIM_S) == 1


def test_giving_all_up_spares_what_generations_wait_for(reservations):
    reservations.receive(open_one(reservations, "got", 5))
    reservations.claim("got", 0.0)
    open_one(reservations, "other", 5, start=100)
    reservations.release_all()
    assert len(reservations) == 1


def test_a_lost_engine_writes_nowhere_any_more(reservations, held):
    found = open_one(reservations)
    reservations.begin_write(found, "a", "s", 0.0)
    reservations.release("r")
    reservations.sender_lost("a")
    assert held.held == 0


class AnyOrder(RuleBasedStateMachine):
    """Whatever is called in whatever order: free + cached + reserved is all there is."""

    names = st.sampled_from("abcd")

    def __init__(self):
        super().__init__()
        numbers = iter(range(10**6))
        self.now_s = 0.0
        self.cache = _cache_class()(CAPACITY)
        self.writers = []
        self.reservations = Reservations(self.cache, lambda _: None, lambda: f"n{next(numbers)}")

    @rule(name=names, tokens=st.integers(1, 20), start=st.integers(0, 3), ttl_s=st.floats(0.1, 20))
    def open(self, name, tokens, start, ttl_s):
        ids = pack_tokens(range(start, start + tokens))
        try:
            self.reservations.open(name, ids, tokens, tokens, ttl_s, self.now_s, 0)
        except (NoKvRoom, BadRequest):
            return

    @rule(name=names, send_id=st.sampled_from("xy"))
    def write(self, name, send_id):
        found = self.reservations._by_id.get(name)
        if found is not None and not found.received:
            try:
                self.reservations.begin_write(found, "agent", send_id + name, self.now_s)
            except TransferFailed:
                return
            self.writers.append(send_id + name)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), received=st.booleans())
    def finish(self, data, received):
        send_id = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        found = self.reservations.writer("agent", send_id)
        if received and found is not None:
            self.reservations.receive(found)
        else:
            self.reservations.sender_stopped("agent", send_id)

    @rule(name=names)
    def release(self, name):
        self.reservations.release(name)

    @rule(name=names)
    def claim(self, name):
        self.reservations.claim(name, self.now_s)

    @rule(seconds=st.floats(0.1, 30))
    def pass_by(self, seconds):
        self.now_s += seconds
        self.reservations.expire(self.now_s)

    @rule(tokens=st.integers(1, CAPACITY))
    def evict(self, tokens):
        self.cache.evict(tokens)

    @invariant()
    def nothing_is_lost(self):
        assert self.cache.held == self.reservations.tokens

    def teardown(self):
        self.reservations.expire(self.now_s + 1000.0)
        self.reservations.expire(self.now_s + 1000.0)
        assert self.cache.held == 0
        assert self.cache.locks.total() == 0
        slots = self.cache.allocate(CAPACITY, 0)
        assert len(np.unique(slots)) == CAPACITY


def _cache_class():
    return AnyOrder.cache_class


@pytest.fixture(autouse=True)
def _cache_for_any_order(cache):
    AnyOrder.cache_class = cache


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_no_slot_is_ever_lost():
    AnyOrder.TestCase("runTest").runTest()
