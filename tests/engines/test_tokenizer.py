"""Tokenizer files and chat templates, as Hugging Face reads them."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, processors

from engines.emulated.language import TOKENIZER
from engines.tokenizer import BadMessages, Tokenizer, TokenizerError

USER = [{"role": "user", "content": "hi"}]


def small_core() -> Core:
    vocabulary = {"<s>": 0, "</s>": 1, "[UNK]": 2, "hi": 3, "there": 4}
    core = Core(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    return core


@pytest.fixture
def make(tmp_path: Path):
    """A model folder with the given configuration and, if given, a template file."""

    def build(template_file: str | None = None, core: Core | None = None, **config: object) -> Tokenizer:
        (core or small_core()).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if template_file is not None:
            (tmp_path / "chat_template.jinja").write_text(template_file)
        return Tokenizer.load(tmp_path, now=lambda: datetime(2024, 7, 26, tzinfo=UTC))

    return build


def test_a_file_and_its_folder_are_the_same_tokenizer():
    text = "Shall I compare thee to a summer's day?"
    assert Tokenizer.load(TOKENIZER).encode(text) == Tokenizer.load(TOKENIZER / "tokenizer.json").encode(text)


@pytest.mark.parametrize("text", ["", " ", "naïve — 東京 🙂", "a\n\n\tb  c", "<|im_end|>x"])
def test_text_survives_unless_it_is_a_special_token(text):
    tokenizer = Tokenizer.load(TOKENIZER)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_end|>", "")


def test_bos_and_eos_follow_the_configuration(make):
    assert make(bos_token="<s>", eos_token="</s>", add_bos_token=True).encode("hi there") == [0, 3, 4]
    both = make(bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=True, add_eos_token=True)
    assert both.encode("hi") == [0, 3, 1]
    assert make(bos_token="<s>", add_bos_token=False).encode("hi") == [3]


def test_without_a_word_about_bos_the_tokenizer_file_decides(make):
    core = small_core()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert make(core=core, bos_token="<s>").encode("hi") == [0, 3]
    assert make(core=core, bos_token="<s>", add_bos_token=False).encode("hi") == [3]


def test_a_chat_gets_no_second_bos(make):
    tokenizer = make(bos_token="<s>", add_bos_token=True, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.encode_chat(USER) == [0, 3]


def test_a_template_file_wins_over_the_configuration(make):
    assert make("there", chat_template="hi").render_chat(USER) == "there"


def test_of_named_templates_the_default_counts(make):
    named = [{"name": "tool_use", "template": "there"}, {"name": "default", "template": "hi"}]
    assert make(chat_template=named).render_chat(USER) == "hi"


def test_templates_are_asked_for_a_generation_prompt_and_get_extra_arguments(make):
    tokenizer = make("{{ add_generation_prompt }} {{ enable_thinking }}")
    assert tokenizer.render_chat(USER, template_kwargs={"enable_thinking": False}) == "True False"


def test_templates_may_use_what_hugging_face_gives_them(make):
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}"
        "{{ tools | tojson(indent=1) }}{{ strftime_now('%d %b %Y') }}"
    )
    rendered = make(source).render_chat([*USER, *USER], tools=[{"b": "<é>", "a": 1}])
    assert rendered == 'user[\n {\n  "b": "<é>",\n  "a": 1\n }\n]26 Jul 2024'


def test_blocks_leave_no_white_space(make):
    assert make("a\n  {% if true %}\nb\n  {% endif %}\nc").render_chat(USER) == "a\nb\nc"


def test_a_template_can_refuse(make):
    with pytest.raises(BadMessages, match="roles must alternate"):
        make("{{ raise_exception('roles must alternate') }}").render_chat(USER)


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"])
def test_a_template_that_misbehaves_is_an_error_of_the_request(make, attack):
    with pytest.raises(BadMessages):
        make(attack + "{{ undefined.thing }}").render_chat(USER)


def test_parts_become_one_text_unless_the_template_walks_through_them(make):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert make("{{ messages[0].content }}").render_chat(parts) == "a b"
    walking = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert make(walking).render_chat(parts) == "[a][b]"


def test_arguments_of_tool_calls_are_objects_to_the_template(make):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    tokenizer = make("{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments.x }}")
    assert tokenizer.render_chat([message]) == "1"


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": "user", "content": 5}, {"role": 1, "content": ""}])
def test_messages_without_role_or_text_are_refused(make, message):
    with pytest.raises(BadMessages):
        make("x").render_chat([message])


def test_a_model_without_a_template_says_so(make):
    with pytest.raises(BadMessages, match="no chat template"):
        make().encode_chat(USER)


def test_no_token_is_longer_than_the_longest():
    tokenizer = Tokenizer.load(TOKENIZER)
    text = "Shall I compare thee? " * 10 + "=" * 500 + "東京" * 20
    assert len(tokenizer.encode(text)) >= len(text.encode()) / tokenizer.max_token_bytes
    assert all(len(tokenizer.decode([token]).encode()) <= tokenizer.max_token_bytes for token in range(1000, 1500))


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a usable tokenizer"):
        Tokenizer.load(tmp_path)
