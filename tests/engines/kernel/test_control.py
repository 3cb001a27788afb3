"""The kernel's knobs, draining and load; and no room is lost in any order of calls."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.emulated.kernel import Event, Finished, Kernel, Pass, Token
from engines.errors import BadRequest, ContextTooLong, Draining, NoKvRoom, ReservationGone
from engines.protocol import Config
from tests.support.virtual_kernel import Virtual, count_up, make_profile, prompt


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
