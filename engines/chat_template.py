"""A model's chat template: messages to the text that the model was trained on. Jinja in a sandbox."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ITERATES_CONTENT = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")
"""Templates that walk through a message's parts want them as a list; all others want one string."""


class BadMessages(ValueError):
    """A chat that cannot be rendered; the message says what is wrong with it."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Compiled once. Renders as Hugging Face's `apply_chat_template` does, with a generation prompt at the end."""

    def __init__(self, source: str, variables: Mapping[str, str], now: Callable[[], datetime]) -> None:
        self._template = _environment(now).from_string(source)
        self._variables = dict(variables)
        self._wants_parts = ITERATES_CONTENT.search(source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """Raises `BadMessages`."""
        prepared = [self._prepared(message) for message in messages]
        given = {"add_generation_prompt": True, **self._variables, **(template_kwargs or {})}
        try:
            return self._template.render(messages=prepared, tools=list(tools) if tools else None, **given)
        # A template may do anything with what a client sent it, so any error in there is the message's fault.
        except Exception as error:
            raise BadMessages(f"the chat template refuses these messages: {error}") from error

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message.get("role"), str):
            raise BadMessages("every message needs a role")
        prepared = dict(message)
        prepared["content"] = self._content(message.get("content"))
        if calls := message.get("tool_calls"):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return prepared

    def _content(self, content: object) -> object:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise BadMessages("message content must be a string or a list of parts")
        texts = [_part_text(part) for part in content]
        return [{"type": "text", "text": text} for text in texts] if self._wants_parts else " ".join(texts)


def _part_text(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise BadMessages(f"message parts of type {kind!r} are not supported: only text is")


def _with_parsed_arguments(call: object) -> object:
    """Clients send a call's arguments as a JSON string; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except ValueError:
        return call


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters and sorts keys; prompts must have neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
