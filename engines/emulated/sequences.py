"""One request inside the kernel: its tokens, how far it has come and which KV it holds."""

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engines.emulated.radix import Node
from engines.types import EngineTimings


class GenerationState(Protocol):
    """What a token chooser may look at. Read only: the kernel owns it and goes on changing it."""

    @property
    def request_id(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def prompt(self) -> "array[int]": ...
    @property
    def outputs(self) -> "array[int]":
        """Output tokens so far, oldest first."""
        ...

    @property
    def max_tokens(self) -> int: ...


ChooseToken = Callable[[GenerationState], int]
"""The next output token of a generation: a pure, cheap function of its state, called once per token."""


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PREFILLED = "prefilled"
    """A prefill job whose KV is there and pinned."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A generation, or a prefill job when `max_tokens` is 0. Satisfies `GenerationState`."""

    request_id: str
    prompt: "array[int]"
    max_tokens: int
    order: int
    """Rank by submission; the highest is the youngest."""
    submitted_s: float
    group: str | None = None
    expected_prefill_tokens: int = 0
    """While it waits: how much of it was not in the cache when it was submitted."""
    outputs: "array[int]" = field(default_factory=lambda: array("I"))
    to_compute: "array[int]" = field(default_factory=lambda: array("I"))
    """Tokens whose KV must be there before the next output token: the prompt, after a retraction also the outputs."""
    phase: Phase = Phase.WAITING
    ended: bool = False
    """It was finished or aborted during a pass, and lets go of its KV when the pass ends."""
    node: Node | None = None
    """The end of the prefix that it has locked in the cache."""
    locked_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def prefill_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def remaining_prefill_tokens(self) -> int:
        return len(self.to_compute) - self.computed_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens that it has KV room for. The newest output's KV is only computed by the next decode pass."""
        if self.phase is Phase.RUNNING:
            return len(self.prompt) + len(self.outputs) - 1
        return 0 if self.phase is Phase.WAITING else len(self.to_compute)

    @property
    def private_tokens(self) -> int:
        """The part of `kv_tokens` that is not in the cache."""
        return self.kv_tokens - self.locked_tokens

    def timings(self, now_s: float) -> EngineTimings:
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return EngineTimings(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.outputs),
            queue_s=admitted_s - self.submitted_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
        )
