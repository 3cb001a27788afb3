"""One `start_generate`: the client's body goes to SGLang's own endpoint, and its answer comes back with timings."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from engines.errors import BadRequest, ContextTooLong, EngineError, UnknownModel, from_answer
from engines.protocol import TIMINGS_COMMENT, StartGenerate
from engines.sglang.messages import Prefilled
from engines.sglang.resume import Resume
from engines.types import EngineTimings

DONE = b"data: [DONE]"
ID_OPENS = b'data: {"id":"'
PREFIXES = {"completions": "cmpl-", "chat": "chatcmpl-"}
TOO_LONG = ("context length", "context window", "maximum allowed length")


class Generation:
    """Looks on while SGLang serves a request. See `internals.Observer`."""

    def __init__(
        self,
        call: StartGenerate,
        body: Mapping[str, Any],
        rid: str,
        clock: Callable[[], float],
        encode: Callable[[str], list[int]],
        on_mismatch: Callable[[], None],
        on_resumed: Callable[[str, list[int]], None],
    ) -> None:
        """`body` is the call's, decoded.

        `on_mismatch` is called if the caller tokenized otherwise, `on_resumed` with the id of each generation whose
        prompt ends with tokens that were generated elsewhere, and those tokens.
        """
        self.call = call
        self.rid = rid
        self._body = body
        self.rids: list[str] = []
        """All generations under this request that were started, for an abort."""
        self._clock = clock
        self._on_mismatch = on_mismatch
        self._on_resumed = on_resumed
        self._resume = Resume(call.resume, encode) if call.resume else None
        self._begun_s = clock()
        self._first_s: float | None = None
        self._last_s = self._begun_s
        self._meta: dict[int, Mapping[str, Any]] = {}
        self._prefilled: Prefilled | None = None
        self.tokens_agree: bool | None = None

    # What SGLang's endpoint runs through.

    async def generate(
        self, original: Callable[..., AsyncGenerator[Any, None]], obj: Any, request: Any
    ) -> AsyncGenerator[Any, None]:
        source = original(obj, request) if self._resume is None else self._resume.generate(original, obj, request)
        async with contextlib.aclosing(source) as answers:
            async for answer in answers:
                self._note(answer)
                yield answer

    def on_requests(self, rids: Sequence[str]) -> None:
        self.rids += rids

    def on_tokenized(self, rid: str, ids: Any) -> list[int] | None:
        """Compare with the caller's ids; the ids to serve instead, if the stream is resumed."""
        own = list(ids)
        if self.call.prompt is not None and self.tokens_agree is not False and self._is_only_prompt():
            self.tokens_agree = own == self.call.prompt
            if not self.tokens_agree:
                self._on_mismatch()
        appended = self._resume.appended(rid) if self._resume is not None else []
        if not appended:
            return None
        self._on_resumed(rid, appended)
        return own + appended

    def on_prefilled(self, event: Prefilled) -> None:
        self._prefilled = event
        self._first_s = self._clock()

    @property
    def replaying(self) -> bool:
        return self._resume is not None and self._resume.replaying

    # The answer.

    async def events(self, chunks: AsyncGenerator[str | bytes, None]) -> AsyncGenerator[bytes, None]:
        """SGLang's events under the request's id, with the timings before the end."""
        answer_id = self.answer_id.encode()
        told = False
        async with contextlib.aclosing(chunks) as opened:
            async for chunk in opened:
                if self.replaying:
                    continue
                data = chunk.encode() if isinstance(chunk, str) else chunk
                if data.startswith(DONE):
                    yield self._comment()
                    told = True
                yield with_id(data, answer_id)
        if not told:
            yield self._comment()

    @property
    def answer_id(self) -> str:
        return PREFIXES[self.call.api] + self.call.request_id

    def plain(self, document: bytes) -> bytes:
        """SGLang's answer under the request's id."""
        found = msgspec.json.decode(document)
        if isinstance(found, dict) and "id" in found:
            found["id"] = self.answer_id
        return msgspec.json.encode(found)

    def timings(self) -> EngineTimings:
        """Of the request as a whole: queue and prefill of its first token, decode until the last was through.

        All that passed before its first pass is queue: the scheduler does not even see it while it is in a pass.
        """
        metas = [self._meta[index] for index in sorted(self._meta)]
        prompts = metas[:: self._choices_per_prompt()]
        first_s = self._last_s if self._first_s is None else self._first_s
        before_decode_s = max(0.0, first_s - self._begun_s)
        prefill_s = before_decode_s if self._prefilled is None else min(before_decode_s, self._prefilled.prefill_s)
        return EngineTimings(
            prompt_tokens=sum(meta.get("prompt_tokens", 0) for meta in prompts),
            cached_tokens=sum(meta.get("cached_tokens", 0) for meta in prompts),
            output_tokens=sum(meta.get("completion_tokens", 0) for meta in metas),
            queue_s=before_decode_s - prefill_s,
            prefill_s=prefill_s,
            decode_s=max(0.0, self._last_s - first_s),
            tokens_agree=self.tokens_agree,
        )

    def _comment(self) -> bytes:
        return TIMINGS_COMMENT + msgspec.json.encode(self.timings()) + b"\n\n"

    def _note(self, answer: Any) -> None:
        if not self.replaying:
            self._last_s = self._clock()
            self._first_s = self._last_s if self._first_s is None else self._first_s
        for place, one in enumerate(answer if isinstance(answer, list) else [answer]):
            self._meta[one.get("index", place)] = one["meta_info"]

    def _choices_per_prompt(self) -> int:
        return choices_per_prompt(self._body)

    def _is_only_prompt(self) -> bool:
        """A caller's ids are of a single prompt; with several there is nothing to compare."""
        return count_prompts(self._body) == 1


def count_prompts(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    return len(prompt or ()) if several else 1


def choices_per_prompt(body: Mapping[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) and n > 0 else 1


def check_resume(call: StartGenerate, body: Mapping[str, Any]) -> None:
    """Raises `BadRequest`."""
    if not call.resume:
        return
    if not body.get("stream"):
        raise BadRequest("only a stream can be resumed")
    choices = count_prompts(body) * choices_per_prompt(body)
    for resumed in call.resume:
        if not 0 <= resumed.index < choices:
            raise BadRequest(f"resume names choice {resumed.index}, but the request has only {choices}")


def with_id(event: bytes, answer_id: bytes) -> bytes:
    """An event with its id replaced; SGLang puts it first."""
    if not event.startswith(ID_OPENS):
        return event
    return ID_OPENS + answer_id + event[event.index(b'"', len(ID_OPENS)) :]


def refused(status: int, document: bytes) -> EngineError:
    """What SGLang's endpoint refused a request for, as one of our errors."""
    try:
        found = msgspec.json.decode(document)
    except msgspec.DecodeError:
        found = {}
    inner = found.get("error", found) if isinstance(found, dict) else {}
    message = str(inner.get("message") or inner.get("detail") or "the engine refused the request")
    if status == 404:
        return UnknownModel(message)
    if status == 400 and any(words in message for words in TOO_LONG):
        return ContextTooLong(message)
    if 400 <= status < 500 and status not in (413, 429):
        return BadRequest(message)
    return from_answer(status, None, message)
