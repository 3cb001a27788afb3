"""OpenAI answers as bytes: stream events and plain documents of both endpoints."""

from collections.abc import Sequence

import msgspec
import orjson

from engines.emulated.language import Language
from engines.emulated.logprobs import chat_logprobs, completion_logprobs
from engines.emulated.openai import Ask
from engines.emulated.stops import Piece
from engines.protocol import TIMINGS_COMMENT
from engines.types import EngineTimings

DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def document(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChoiceText(msgspec.Struct, kw_only=True):
    """The visible part of one finished choice of a plain answer."""

    index: int
    echo: str
    pieces: list[Piece]
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return self.echo + "".join(piece.text for piece in self.pieces)


class Format:
    """Spells one answer. What stays the same from event to event is encoded once."""

    def __init__(self, ask: Ask, request_id: str, created_s: int, language: Language) -> None:
        chat = ask.api == "chat"
        self._ask = ask
        self._language = language
        self._id = ("chatcmpl-" if chat else "cmpl-") + request_id
        self._created_s = created_s
        self._event_head = b"data: " + self._envelope("chat.completion.chunk" if chat else "text_completion")
        self._tail = b'}],"usage":null}\n\n' if ask.include_usage else b"}]}\n\n"
        self._open = b'"delta":{"content":' if chat else b'"text":'
        self._open_with_role = b'"delta":{"role":"assistant","content":' if chat else self._open
        self._close = b'},"logprobs":' if chat else b',"logprobs":'

    def event(self, index: int, piece: Piece, *, role: bool, offset: int, finish: str | None) -> bytes:
        """One token of one choice as a whole event. `role`: it is the choice's first; `offset`: characters so far."""
        return b'%b"choices":[{"index":%d,%b%b%b%b,"finish_reason":%b%b' % (
            self._event_head,
            index,
            self._open_with_role if role else self._open,
            orjson.dumps(piece.text),
            self._close,
            b"null"
            if self._ask.logprobs is None or piece.token is None
            else orjson.dumps(self._logprobs([piece], offset)),
            b'"%b"' % finish.encode() if finish else b"null",
            self._tail,
        )

    def ending(self, usage: Usage, timings: EngineTimings | None) -> bytes:
        """The events after the last token."""
        parts = []
        if self._ask.include_usage:
            parts.append(b'%b"choices":[],"usage":%b}\n\n' % (self._event_head, orjson.dumps(usage.document())))
        if timings is not None:
            parts.append(TIMINGS_COMMENT + msgspec.json.encode(timings) + b"\n\n")
        return b"".join([*parts, DONE])

    def plain(self, choices: Sequence[ChoiceText], usage: Usage) -> bytes:
        """The whole answer as one document."""
        spelled = [self._chat_choice(choice) if self._ask.api == "chat" else self._choice(choice) for choice in choices]
        head = self._envelope("chat.completion" if self._ask.api == "chat" else "text_completion")
        return b'%b"choices":%b,"usage":%b}' % (head, orjson.dumps(spelled), orjson.dumps(usage.document()))

    def _envelope(self, kind: str) -> bytes:
        fields = {"id": self._id, "object": kind, "created": self._created_s, "model": self._ask.model}
        return orjson.dumps(fields)[:-1] + b","

    def _choice(self, choice: ChoiceText) -> dict[str, object]:
        logprobs = None if self._ask.logprobs is None else self._logprobs(choice.pieces, len(choice.echo))
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _chat_choice(self, choice: ChoiceText) -> dict[str, object]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if self._ask.logprobs is None else self._logprobs(choice.pieces, 0),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, object]:
        top = self._ask.logprobs or 0
        if self._ask.api == "chat":
            return chat_logprobs(self._language, pieces, top)
        return completion_logprobs(self._language, pieces, top, offset)
