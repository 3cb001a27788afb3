"""The emulated model: fluent nonsense, and the same nonsense for the same context on every engine."""

import re
from array import array
from collections.abc import Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from engines.emulated.sequences import GenerationState
from engines.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parent / "tokenizer"
MEAN_OUTPUT_TOKENS = 120
MAX_CHOICES = 128
WORD = re.compile(r" [A-Za-z]{2,}")
END_BITS = 24
END_BELOW = (1 << END_BITS) // MEAN_OUTPUT_TOKENS


def load_tokenizer() -> Tokenizer:
    """The small tokenizer that every emulated engine uses."""
    return Tokenizer.load(TOKENIZER)


class Language:
    """Chooses tokens as greedy decoding would: a pure function of the last tokens, their number and the choice.

    Only whole words whose text encodes back to the same single id are ever chosen, so text that goes through a client
    and comes back as a prompt has as many tokens as were generated.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        words = _words(tokenizer)
        if not words:
            raise ValueError("this tokenizer has no whole words with a leading space to speak with")
        self._ids = sorted(words)
        self._texts = words

    def choose(self, state: GenerationState) -> int:
        """The next token. The kernel's request id begins with the choice it is for, as `choice_id` made it."""
        return self._ids[_hash(state.prompt, state.outputs, choice_of(state.request_id)) % len(self._ids)]

    def ends(self, prompt: "array[int]", outputs: "array[int]", choice: int) -> bool:
        """Whether the model says no more after `outputs`: one chance in `MEAN_OUTPUT_TOKENS`, by the context's hash."""
        return _hash(prompt, outputs, choice) >> (64 - END_BITS) < END_BELOW

    def text(self, token: int) -> str:
        """The text of a token that `choose` gave: a space and a word."""
        return self._texts[token]

    @property
    def token_ids(self) -> Sequence[int]:
        """Every token that may be chosen, ascending."""
        return self._ids


def choice_id(choice: int, rest: str) -> str:
    return f"{choice}:{rest}"


def choice_of(request_id: str) -> int:
    return int(request_id.partition(":")[0])


def _words(tokenizer: Tokenizer) -> dict[int, str]:
    found = {}
    for token in tokenizer.vocabulary().values():
        text = tokenizer.decode([token])
        if WORD.fullmatch(text) and tokenizer.encode(text) == [token]:
            found[token] = text
    return found


def _hash(prompt: "array[int]", outputs: "array[int]", choice: int) -> int:
    """64 well-mixed bits of the last four tokens, the length and the choice."""
    recent = outputs[-4:] if len(outputs) >= 4 else (prompt[-4:] + outputs)[-4:]
    return xxh3_64_intdigest(recent.tobytes(), (len(prompt) + len(outputs)) * MAX_CHOICES + choice)
