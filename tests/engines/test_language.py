"""The emulated model: the same context gives the same token, everywhere."""

import statistics
import subprocess
import sys
from array import array
from dataclasses import dataclass, field

import pytest

from engines.emulated.language import MEAN_OUTPUT_TOKENS, Language, choice_id, load_tokenizer
from engines.emulated.stops import StopFilter


@dataclass
class State:
    prompt: "array[int]"
    request_id: str = "0:x"
    group: str | None = None
    outputs: "array[int]" = field(default_factory=lambda: array("I"))
    max_tokens: int = 10_000


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def language(tokenizer):
    return Language(tokenizer)


def speak(language: Language, prompt: list[int], tokens: int, choice: int = 0) -> list[int]:
    state = State(array("I", prompt), choice_id(choice, "x"))
    for _ in range(tokens):
        state.outputs.append(language.choose(state))
    return state.outputs.tolist()


@pytest.mark.parametrize("delivered", range(7))
def test_going_on_from_what_was_said_gives_the_same_text(language, delivered):
    whole = speak(language, [5, 6, 7], 20)
    assert speak(language, [5, 6, 7, *whole[:delivered]], 20 - delivered) == whole[delivered:]


@pytest.mark.parametrize("delivered", range(1, 6))
def test_going_on_ends_where_it_would_have_ended(language, delivered):
    prompt = array("I", [5, 6, 7])
    outputs = array("I", speak(language, [5, 6, 7], 30))
    moved = prompt + outputs[:delivered]
    for length in range(delivered + 1, 30):
        here = language.ends(prompt, outputs[:length], 0)
        assert language.ends(moved, outputs[delivered:length], 0) is here


def test_choices_and_prompts_differ(language):
    said = {tuple(speak(language, [last], 8, choice)) for last in range(10) for choice in range(10)}
    assert len(said) == 100


def test_the_text_does_not_run_in_circles(language):
    said = speak(language, [1], 400)
    assert len({tuple(said[at : at + 4]) for at in range(396)}) > 390


def test_every_token_is_a_word_that_encodes_back_to_it(language, tokenizer):
    assert len(language.token_ids) > 500
    for token in language.token_ids:
        text = language.text(token)
        assert text[0] == " "
        assert text[1:].isascii()
        assert text[1:].isalpha()
        assert tokenizer.encode(text) == [token]


@pytest.mark.parametrize("before", ["", "x", "x ", "x\n", "1.", "  ", "é", "<|im_start|>assistant\n"])
def test_words_keep_their_tokens_behind_any_prompt(language, tokenizer, before):
    said = speak(language, [9], 40)
    text = "".join(map(language.text, said))
    assert tokenizer.encode(before + text) == tokenizer.encode(before) + said


def test_answers_have_the_promised_mean_length(language):
    lengths = []
    for seed in range(400):
        state = State(array("I", [seed]))
        while not lengths or not language.ends(state.prompt, state.outputs, 0) or not state.outputs:
            state.outputs.append(language.choose(state))
            if language.ends(state.prompt, state.outputs, 0):
                break
        lengths.append(len(state.outputs))
    assert 0.8 < statistics.mean(lengths) / MEAN_OUTPUT_TOKENS < 1.2


def test_another_process_speaks_the_same(language):
    program = (
        "from array import array; from types import SimpleNamespace as S;"
        "from engines.emulated.language import *;"
        "print(Language(load_tokenizer()).choose(S(prompt=array('I',[1,2,3]),outputs=array('I'),request_id='0:x')))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(other.stdout) == language.choose(State(array("I", [1, 2, 3])))


def shown(stops: list[str], texts: list[str]) -> tuple[list[str], bool]:
    """What a filter shows of a generation, one text a token."""
    held = StopFilter(stops)
    out: list[str] = []
    for at, text in enumerate(texts):
        pieces, stopped = held.push(at, text)
        out += [piece.text for piece in pieces]
        if stopped:
            return out, True
    return out + [piece.text for piece in held.flush()], False


@pytest.mark.parametrize(
    ("stops", "texts", "expected"),
    [
        ([], [" a", " b"], ([" a", " b"], False)),
        (["b c"], [" a", " b", " c", " d"], ([" a", " "], True)),
        ([" b"], [" a", " b", " c"], ([" a"], True)),
        (["xyz"], [" wx", "y", "w", "xyz"], ([" wx", "y", "w"], True)),
        (["aab"], ["a", "a", "a", "b"], (["a"], True)),
        (["zzz", "b"], ["ab", "c"], (["a"], True)),
        (["later", "early"], ["early later"], ([], True)),
        (["never"], [" nev", " end"], ([" nev", " end"], False)),
        (["end!"], [" the", " end"], ([" the", " end"], False)),
    ],
)
def test_text_before_a_stop_is_shown_and_nothing_of_it(stops, texts, expected):
    assert shown(stops, texts) == expected


def test_nothing_that_may_become_a_stop_is_shown_early():
    held = StopFilter([" b c"])
    assert held.push(0, " a") == ([(0, " a")], False)
    assert held.push(1, " b") == ([], False)
    assert held.push(2, " d") == ([(1, " b"), (2, " d")], False)
