"""Text to token ids as an engine would do it, from a `tokenizer.json` or a model folder. No transformers, no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from engines.chat_template import BadMessages, ChatTemplate

__all__ = ["BadMessages", "Tokenizer", "TokenizerError"]

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says which file and why."""


class Tokenizer:
    """Encodes prompts and chats. Immutable after loading and safe to share between threads."""

    def __init__(
        self, core: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None, now: Callable[[], datetime]
    ) -> None:
        self._core = core
        self._bos_eos = _asked_bos_eos(core, config)
        variables = {name: token for name in SPECIAL_NAMES if (token := _token_text(config.get(name))) is not None}
        self._template = None if template is None else ChatTemplate(template, variables, now)
        self.eos_token_id: int | None = core.token_to_id(variables.get("eos_token", ""))

    @classmethod
    def load(cls, path: Path, now: Callable[[], datetime] | None = None) -> "Tokenizer":
        """Load a `tokenizer.json`, or a folder that holds one, with `tokenizer_config.json` and
        `chat_template.jinja` beside it if there are any.

        `now` is what templates that print the date see. Raises `TokenizerError`.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            core = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
            config = _config(file.parent)
            return cls(core, config, _template(file.parent, config), now or _local_time)
        except OSError as error:
            raise TokenizerError(
                f"{error.filename}: {error.strerror}; give a tokenizer.json or a model folder"
            ) from error
        # The tokenizers package reports a file it cannot use as a bare Exception.
        except Exception as error:
            raise TokenizerError(f"{file} is not a usable tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self._core.get_vocab_size(with_added_tokens=True)

    @property
    def max_token_bytes(self) -> int:
        """The most bytes of UTF-8 text that one ordinary token stands for, so n bytes are at least n/this tokens."""
        return max(_text_bytes(token) for token in self._core.get_vocab(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with BOS and EOS as the model's files ask for."""
        if self._bos_eos is None:
            return self._core.encode(text).ids
        bos, eos = self._bos_eos
        return [*bos, *self._core.encode(text, add_special_tokens=False).ids, *eos]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, ending where the assistant's answer begins.

        Raises `BadMessages` when the template refuses them, they hold other parts than text, or there is no template.
        """
        text = self.render_chat(messages, tools, template_kwargs)
        return self._core.encode(text, add_special_tokens=False).ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text behind `encode_chat`."""
        if self._template is None:
            raise BadMessages("this model has no chat template: use /v1/completions")
        return self._template.render(messages, tools, template_kwargs)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        return self._core.decode(list(ids), skip_special_tokens=True)

    def vocabulary(self) -> Mapping[str, int]:
        """Every token, spelled as the model's files spell it, and its id."""
        return self._core.get_vocab(with_added_tokens=True)


def _local_time() -> datetime:
    return datetime.now().astimezone()


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the configuration; of several named templates, `default` counts."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given}.get("default")
    return given if isinstance(given, str) else None


def _token_text(given: object) -> str | None:
    """Special tokens are written as `"<s>"` or as `{"content": "<s>", …}`."""
    if isinstance(given, dict):
        given = given.get("content")
    return given if isinstance(given, str) else None


def _asked_bos_eos(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Ids to put around a prompt if the configuration says so; `None` leaves it to `tokenizer.json`."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return None
    around = []
    for name in ("bos", "eos"):
        wanted = bool(config.get(f"add_{name}_token"))
        token_id = core.token_to_id(_token_text(config.get(f"{name}_token")) or "") if wanted else None
        around.append([] if token_id is None else [token_id])
    return around[0], around[1]


def _text_bytes(token: str) -> int:
    """Bytes of text behind a vocabulary entry: byte-level BPE spells each byte as one character below U+0144."""
    if all(ord(character) < 0x144 for character in token):
        return len(token)
    return len(token.replace("\u2581", " ").encode("utf-8", errors="replace"))
