"""OpenAI request bodies: what a client may ask for, checked, as one `Ask` for both endpoints."""

import re
from array import array
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from engines.emulated.language import MAX_CHOICES
from engines.errors import BadRequest, ContextTooLong, UnknownModel
from engines.tokenizer import BadMessages, Tokenizer

Api = Literal["completions", "chat"]
Body = TypeVar("Body")
MAX_STOPS = 16
FIELD = re.compile(r"(?:`\$\.?([^`]*)`|field `([^`]+)`)")


class BadBody(BadRequest):
    """A client's body is wrong; `param` names the field."""

    code = "bad_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True, frozen=True):
    """What both endpoints share. Fields that change nothing here are only checked, or ignored."""

    model: str
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None


class CompletionBody(_Body, kw_only=True, frozen=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(_Body, kw_only=True, frozen=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request: everything a generation needs to know."""

    api: Api
    model: str
    prompts: Sequence["array[int]"]
    echoes: Sequence[str] | None
    """The text of each prompt, if it is to stand before the answer."""
    max_tokens: Sequence[int]
    """For each prompt."""
    min_tokens: int
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool
    logprobs: int | None
    """How many alternatives to list beside each token's own; `None` for no logprobs at all."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can take."""

    model: str
    context_tokens: int
    default_max_tokens: int
    vocab_size: int
    max_token_bytes: int


def read_ask(api: Api, raw: bytes | msgspec.Raw, tokenizer: Tokenizer, limits: Limits) -> Ask:
    """Decode and check a client's body. Raises `BadBody`, `UnknownModel`, `ContextTooLong`."""
    return read_chat(raw, tokenizer, limits) if api == "chat" else read_completion(raw, tokenizer, limits)


def read_completion(raw: bytes | msgspec.Raw, tokenizer: Tokenizer, limits: Limits) -> Ask:
    body = decode_body(raw, CompletionBody)
    _check_common(body, limits)
    _within("logprobs", body.logprobs, 0, 20)
    prompts = _prompts(body.prompt, tokenizer, limits)
    echoes = [tokenizer.decode(prompt) for prompt in prompts] if body.echo else None
    return _ask("completions", body, prompts, body.max_tokens, echoes, body.logprobs, limits)


def read_chat(raw: bytes | msgspec.Raw, tokenizer: Tokenizer, limits: Limits) -> Ask:
    body = decode_body(raw, ChatBody)
    _check_common(body, limits)
    _within("max_completion_tokens", body.max_completion_tokens, 1, None)
    _within("top_logprobs", body.top_logprobs, 0, 20)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadBody("top_logprobs needs logprobs: true", "top_logprobs")
    prompt = encode_messages(tokenizer, body.messages, body.tools, body.chat_template_kwargs)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _ask("chat", body, [array("I", prompt)], max_tokens, None, logprobs, limits)


def encode_messages(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Raises `BadBody`."""
    if not messages:
        raise BadBody("messages is empty", "messages")
    try:
        return tokenizer.encode_chat(messages, tools, template_kwargs)
    except BadMessages as error:
        raise BadBody(str(error), "messages") from error


def decode_body(raw: bytes | msgspec.Raw, kind: type[Body]) -> Body:
    """Raises `BadBody` that names the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise BadBody(str(error), _field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not valid JSON: {error}") from error


def _field(message: str) -> str | None:
    found = FIELD.findall(message)
    return next((name for pair in reversed(found) for name in pair if name), None)


def _check_common(body: _Body, limits: Limits) -> None:
    if body.model != limits.model:
        raise UnknownModel(f"the model {body.model!r} does not exist here; this engine serves {limits.model!r}")
    _within("max_tokens", body.max_tokens, 1, None)
    _within("n", body.n, 1, MAX_CHOICES)
    _within("temperature", body.temperature, 0, 2)
    _within("top_p", body.top_p, 0, 1)
    _within("min_tokens", body.min_tokens, 0, None)
    if body.stream_options is not None and not body.stream:
        raise BadBody("stream_options needs stream: true", "stream_options")


def _within(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is not None and not (low <= value and (high is None or value <= high)):
        raise BadBody(
            f"{name} is {value}, but must be {f'{low} to {high}' if high is not None else f'at least {low}'}", name
        )


def _prompts(given: str | list[str | int | list[int]], tokenizer: Tokenizer, limits: Limits) -> list["array[int]"]:
    """One prompt for a string or a list of ids, several for a list of either."""
    items = [given] if isinstance(given, str) or _are_ids(given) else given
    prompts = [_prompt(item, tokenizer, limits) for item in items]
    if not prompts or not all(prompts):
        raise BadBody("the prompt is empty", "prompt")
    if len(prompts) > MAX_CHOICES:
        raise BadBody(f"{len(prompts)} prompts are more than {MAX_CHOICES} in one request", "prompt")
    return prompts


def _are_ids(given: list[str | int | list[int]]) -> bool:
    return any(isinstance(item, int) for item in given)


def _prompt(item: object, tokenizer: Tokenizer, limits: Limits) -> "array[int]":
    if isinstance(item, str):
        _check_may_fit(len(item), limits)
        return array("I", tokenizer.encode(item))
    if not isinstance(item, list) or not all(isinstance(token, int) for token in item):
        raise BadBody("prompt must be a string, a list of token ids, or a list of either", "prompt")
    if item and not 0 <= min(item) <= max(item) < limits.vocab_size:
        raise BadBody(f"token ids must be 0 to {limits.vocab_size - 1}", "prompt")
    return array("I", item)


def _ask(
    api: Api,
    body: _Body,
    prompts: Sequence["array[int]"],
    max_tokens: int | None,
    echoes: Sequence[str] | None,
    logprobs: int | None,
    limits: Limits,
) -> Ask:
    return Ask(
        api=api,
        model=body.model,
        prompts=prompts,
        echoes=echoes,
        max_tokens=[_output_limit(len(prompt), max_tokens, limits) for prompt in prompts],
        min_tokens=body.min_tokens or 0,
        n=body.n or 1,
        stops=_stops(body.stop),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def _check_may_fit(characters: int, limits: Limits) -> None:
    """Spare the tokenizer what cannot fit however it is cut."""
    if characters > limits.context_tokens * limits.max_token_bytes:
        raise ContextTooLong(
            f"the context is {limits.context_tokens} tokens, but {characters} characters are in the prompt: shorten it"
        )


def _output_limit(prompt_tokens: int, max_tokens: int | None, limits: Limits) -> int:
    room = limits.context_tokens - prompt_tokens
    if room < 1 or (max_tokens is not None and max_tokens > room):
        asked = "" if max_tokens is None else f" and {max_tokens} for the answer"
        raise ContextTooLong(
            f"the context is {limits.context_tokens} tokens long, but {prompt_tokens} are in the prompt{asked}: "
            "shorten the prompt or the answer"
        )
    return min(limits.default_max_tokens, room) if max_tokens is None else max_tokens


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise BadBody(f"stop must be up to {MAX_STOPS} strings, none of them empty", "stop")
    return stops
