"""One choice of a request on its way: what it began with, what came out, how it ended."""

from array import array
from dataclasses import dataclass, field

from engines.emulated.language import choice_id
from engines.emulated.openai import Ask
from engines.emulated.stops import StopFilter
from engines.protocol import ResumedChoice
from engines.tokenizer import Tokenizer
from engines.types import EngineTimings


@dataclass(slots=True, eq=False)
class Choice:
    index: int
    prompt_index: int
    sample: int
    """Which of the prompt's `n` answers this is; the emulated model speaks by it."""
    kernel_id: str
    prompt: "array[int]"
    """The client's prompt, and behind it what was already delivered."""
    delivered_tokens: int
    """Output tokens the client had before, from another engine."""
    max_new_tokens: int
    stops: StopFilter
    fresh: bool = True
    """Nothing of it was shown yet, here or elsewhere."""
    offset: int = 0
    """Characters shown so far."""
    outputs: "array[int]" = field(default_factory=lambda: array("I"))
    finish_reason: str | None = None
    timings: EngineTimings | None = None

    @property
    def output_tokens(self) -> int:
        return self.delivered_tokens + len(self.outputs)


def make_choices(ask: Ask, serial: str, resume: list[ResumedChoice] | None, tokenizer: Tokenizer) -> list[Choice]:
    """All choices of a request, in order of index, those that had ended elsewhere included."""
    resumed = {choice.index: choice for choice in resume or ()}
    total = len(ask.prompts) * ask.n
    return [_make(ask, index, serial, resumed.get(index), tokenizer) for index in range(total)]


def _make(ask: Ask, index: int, serial: str, resumed: ResumedChoice | None, tokenizer: Tokenizer) -> Choice:
    prompt_index, sample = divmod(index, ask.n)
    delivered = _delivered(ask, prompt_index, resumed, tokenizer)
    ended = resumed.finish_reason if resumed else None
    delivered_tokens = resumed.tokens if resumed and ended else len(delivered)
    max_new_tokens = ask.max_tokens[prompt_index] - delivered_tokens
    return Choice(
        index=index,
        prompt_index=prompt_index,
        sample=sample,
        kernel_id=choice_id(sample, f"{serial}.{index}"),
        prompt=ask.prompts[prompt_index] + delivered if delivered else ask.prompts[prompt_index],
        delivered_tokens=delivered_tokens,
        max_new_tokens=max_new_tokens,
        stops=StopFilter(ask.stops),
        fresh=resumed is None,
        offset=len(resumed.text) if resumed else 0,
        finish_reason=ended,
    )


def _delivered(ask: Ask, prompt_index: int, resumed: ResumedChoice | None, tokenizer: Tokenizer) -> "array[int]":
    """The tokens behind delivered text. They are counted anew: this tokenizer gives back exactly what was generated."""
    if resumed is None:
        return array("I")
    echo = ask.echoes[prompt_index] if ask.echoes else ""
    return array("I", tokenizer.encode(resumed.text.removeprefix(echo)))
