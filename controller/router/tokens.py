"""Token ids of a prompt: from the router's own tokenizer where it has one, else through an engine."""

import asyncio
from pathlib import Path
from typing import Any, Protocol

import msgspec

from controller.router.fleet import Fleet
from controller.router.openai import ABSENT, Asked
from engines.client import Prompt
from engines.errors import EngineError, EngineUnreachable
from engines.protocol import Tokenize
from engines.tokenizer import Tokenizer
from engines.tracing import Trace

INLINE_BYTES = 16 * 1024
"""Longer prompts are tokenized on a thread: the tokenizer releases the GIL, and the event loop goes on."""


NO_TOKENS = (ValueError, msgspec.DecodeError, RecursionError, EngineError)
"""What a prompt that cannot be tokenized raises; the engine that gets the whole body then says what is wrong."""


class TokenSource(Protocol):
    async def encode(self, asked: Asked, fleet: Fleet, trace: Trace | None = None) -> Prompt:
        """The ids of a single prompt. Raises one of `NO_TOKENS` if it has none that we can make."""
        ...


def open_token_source(path: Path | None) -> TokenSource:
    return EngineTokens() if path is None else OwnTokens(Tokenizer.load(path))


class OwnTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, asked: Asked, fleet: Fleet, trace: Trace | None = None) -> Prompt:
        if asked.has_token_ids:
            return given_ids(asked)
        encode = self._chat if asked.api == "chat" else self._text
        if len(asked.content) <= INLINE_BYTES:
            return Prompt.of(encode(asked))
        return Prompt.of(await asyncio.to_thread(encode, asked))

    def _text(self, asked: Asked) -> list[int]:
        return self._tokenizer.encode(msgspec.json.decode(asked.content, type=str))

    def _chat(self, asked: Asked) -> list[int]:
        return self._tokenizer.encode_chat(
            msgspec.json.decode(asked.content, type=list[dict[str, Any]]),
            tools=_value(asked.body.tools, list[dict[str, Any]]),
            template_kwargs=_value(asked.body.chat_template_kwargs, dict[str, Any]),
        )


class EngineTokens:
    """Asks whichever engine is available and least busy."""

    async def encode(self, asked: Asked, fleet: Fleet, trace: Trace | None = None) -> Prompt:
        if asked.has_token_ids:
            return given_ids(asked)
        views = [view for view in fleet.views if view.available]
        if not views:
            raise EngineUnreachable("no engine is available to tokenize")
        engine = fleet[min(views, key=lambda view: view.load_tokens).engine_id]
        answer = await engine.client.tokenize(_question(asked), trace)
        return Prompt.of(list(answer.tokens))


def given_ids(asked: Asked) -> Prompt:
    """The client sent ids: they are used as they came, without ever becoming Python integers."""
    return Prompt(asked.content, asked.content.count(b",") + 1)


def _question(asked: Asked) -> Tokenize:
    if asked.api == "completions":
        return Tokenize(prompt=msgspec.json.decode(asked.content, type=str))
    return Tokenize(
        messages=msgspec.Raw(asked.content),
        tools=_given(asked.body.tools),
        chat_template_kwargs=_given(asked.body.chat_template_kwargs),
    )


def _given(raw: msgspec.Raw) -> msgspec.Raw | None:
    return None if raw == ABSENT else raw


def _value(raw: msgspec.Raw, kind: Any) -> Any:
    return None if raw == ABSENT else msgspec.json.decode(raw, type=kind | None)
