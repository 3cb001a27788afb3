"""Going on with a stream that broke off on another engine, over whatever parsing SGLang does between tokens and events.

The text that the client has becomes part of the prompt. SGLang's endpoint is first shown that text as if it had been
generated, so that its parsers stand where the other engine's stood; what it makes of that is not sent again.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from engines.protocol import ResumedChoice

Generate = Callable[[Any, Any], AsyncGenerator[Any, None]]
Content = dict[str, Any]


class Resume:
    """The choices of one resumed stream."""

    def __init__(self, choices: Sequence[ResumedChoice], encode: Callable[[str], list[int]]) -> None:
        self._choices = {choice.index: _counted(choice, encode) for choice in choices}
        self._encode = encode
        self._appended: dict[str, list[int]] = {}
        self.replaying = False
        """Events that SGLang makes now are such that the client already has."""

    def appended(self, rid: str) -> list[int]:
        """Token ids behind the prompt of a generation."""
        return self._appended.get(rid, [])

    async def generate(self, original: Generate, obj: Any, request: Any) -> AsyncGenerator[Content, None]:
        """All choices, each going on from where it was."""
        parts = _split(obj)
        for index in sorted(self._choices):
            self.replaying = True
            yield self._delivered(index, parts[index], finish=None)
            self.replaying = False
        streams = [self._go_on(original, part, index, request) for index, part in enumerate(parts)]
        async with contextlib.aclosing(_merged([stream for stream in streams if stream is not None])) as merged:
            async for content in merged:
                yield content

    def _delivered(self, index: int, part: Any, finish: Content | None) -> Content:
        """What the client has of a choice, as if it had been generated here."""
        choice = self._choices[index]
        prompt = part.input_ids if part.text is None else self._encode(part.text)
        meta: dict[str, Any] = {
            "id": part.rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": choice.tokens,
            "cached_tokens": 0,
            "output_token_logprobs_length": 0,
            "output_token_logprobs": [],
            "output_top_logprobs": [],
            "input_token_logprobs": [],
        }
        return {"index": index, "text": choice.text, "output_ids": [], "meta_info": meta}

    def _go_on(self, original: Generate, part: Any, index: int, request: Any) -> AsyncGenerator[Content, None] | None:
        choice = self._choices.get(index)
        if choice is None:
            return self._renumbered(original, part, index, request)
        if choice.finish_reason is not None:
            return None
        limit = part.sampling_params.get("max_new_tokens")
        if limit is not None and limit <= choice.tokens:
            return _once(self._delivered(index, part, finish={"type": "length", "length": choice.tokens}))
        self._appended[part.rid] = self._encode(choice.text)
        _shorten(part.sampling_params, choice.tokens)
        return self._renumbered(original, part, index, request)

    async def _renumbered(
        self, original: Generate, part: Any, index: int, request: Any
    ) -> AsyncGenerator[Content, None]:
        choice = self._choices.get(index)
        stops = _Stops(part.sampling_params.get("stop"), choice.text if choice else "")
        async with contextlib.aclosing(original(part, request)) as answers:
            async for answer in answers:
                content = self._as_whole(answer, index, choice, part.rid)
                stopped = stops.cut(content)
                yield content
                if stopped:
                    return

    def _as_whole(self, answer: Content, index: int, choice: ResumedChoice | None, rid: str) -> Content:
        if choice is None:
            return {**answer, "index": index}
        meta = dict(answer["meta_info"])
        appended = len(self.appended(rid))
        meta["prompt_tokens"] = meta.get("prompt_tokens", 0) - appended
        meta["cached_tokens"] = min(meta.get("cached_tokens", 0), meta["prompt_tokens"])
        meta["completion_tokens"] = meta.get("completion_tokens", 0) + choice.tokens
        return {**answer, "index": index, "text": choice.text + answer["text"], "meta_info": meta}


def _counted(choice: ResumedChoice, encode: Callable[[str], list[int]]) -> ResumedChoice:
    """With all its tokens: who counted events has counted too few where SGLang joined tokens that waited to be sent."""
    return msgspec.structs.replace(choice, tokens=max(choice.tokens, len(encode(choice.text))))


class _Stops:
    """Stop strings that begin in the text the client has and end in new text; SGLang sees only the new."""

    def __init__(self, stop: str | Sequence[str] | None, had: str) -> None:
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())
        self._had = len(had)

    def cut(self, content: Content) -> bool:
        for stop in self._stops if self._had else ():
            at = content["text"].find(stop, max(0, self._had - len(stop) + 1), self._had + len(stop) - 1)
            if at >= 0:
                content["text"] = content["text"][: max(at, self._had)]
                content["meta_info"]["finish_reason"] = {"type": "stop", "matched": stop}
                return True
        return False


def _split(obj: Any) -> list[Any]:
    """One generation object a choice, in order."""
    prompts = _prompts(obj)
    params = dict(obj.sampling_params or {})
    count = params.get("n") or 1
    parts = []
    for index in range(len(prompts) * count):
        part = copy.copy(obj)
        part.rid = f"{obj.rid}_{index}"
        part.text, part.input_ids = prompts[index // count]
        part.sampling_params = {**params, "n": 1}
        parts.append(part)
    return parts


def _prompts(obj: Any) -> list[tuple[Any, Any]]:
    if obj.text is not None:
        return [(text, None) for text in ([obj.text] if isinstance(obj.text, str) else obj.text)]
    ids = obj.input_ids or []
    several = bool(ids) and isinstance(ids[0], list)
    return [(None, one) for one in (ids if several else [ids])]


def _shorten(params: dict[str, Any], had_tokens: int) -> None:
    for name in ("max_new_tokens", "min_new_tokens"):
        if params.get(name):
            params[name] = max(0, params[name] - had_tokens)


async def _once(content: Content) -> AsyncGenerator[Content, None]:
    yield content


async def _merged(streams: Sequence[AsyncGenerator[Content, None]]) -> AsyncGenerator[Content, None]:
    """What any of them yields, as it comes."""
    if len(streams) == 1:
        async for content in streams[0]:
            yield content
        return
    pending = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = pending.pop(task)
                with contextlib.suppress(StopAsyncIteration):
                    yield task.result()
                    pending[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
