"""An emulated engine's kernel, driven in virtual time."""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from engines.emulated.kernel import Event, Finished, GenerationState, Kernel, Pass, Prefilled, Token
from engines.emulated.profile import Profile, load_profile


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
