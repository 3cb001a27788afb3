"""The client's side of a request: what the router reads from an OpenAI body, and errors in OpenAI's shape.

Only the fields that steer routing are decoded; prompt and messages stay the bytes they came as. Everything else is
the engine's to judge, and the body travels to it unchanged.
"""

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from engines.client import Api

ABSENT = msgspec.Raw(b"")
APIS: dict[bytes, Api] = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}


class ApiError(Exception):
    """An answer to the client that is not a completion, in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> bytes:
        """Header lines that belong to this error."""
        if self.status == 401:
            return b"www-authenticate: Bearer\r\n"
        return b"retry-after: %d\r\n" % max(1, round(self.retry_after_s)) if self.retry_after_s is not None else b""


class Body(msgspec.Struct):
    """What steers routing. Unknown fields are ignored here and travel on to the engine."""

    model: str | None = None
    prompt: msgspec.Raw = ABSENT
    messages: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    stream: bool | None = None
    n: int | None = None


_decoder = msgspec.json.Decoder(Body)


@dataclass(slots=True)
class Asked:
    """A request the router understood."""

    api: Api
    raw: bytes
    stream: bool
    content: bytes
    """JSON of the prompt or of the messages: what prefixes are compared on."""
    body: Body
    choices: int = 1

    BYTES_PER_TOKEN: ClassVar[int] = 4
    """Of English text, roughly; only used while nothing better is known."""

    @property
    def has_token_ids(self) -> bool:
        """Whether the prompt came as one list of token ids."""
        return self.api == "completions" and self.content[:1] == b"[" and self.content[1:].lstrip()[:1].isdigit()

    @property
    def splittable(self) -> bool:
        """A single prompt; several in one request have no common split."""
        return self.api == "chat" or self.content[:1] == b'"' or self.has_token_ids

    def estimated_tokens(self) -> int:
        if self.has_token_ids:
            return self.content.count(b",") + 1
        return len(self.content) // self.BYTES_PER_TOKEN + 1


def parse(path: bytes, raw: bytes, model: str) -> Asked:
    """Read a body. Raises `ApiError` (400 for bad JSON or types, 404 for another model)."""
    api = APIS[path]
    try:
        body = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    field = "messages" if api == "chat" else "prompt"
    content = bytes(body.messages if api == "chat" else body.prompt)
    if body.model is None:
        raise ApiError(400, "you must provide a model parameter", param="model", code="missing_required_parameter")
    if body.model != model:
        sentence = f"the model '{body.model[:100]}' does not exist here; this router serves '{model}'"
        raise ApiError(404, sentence, param="model", code="model_not_found")
    if not content or content == b"null":
        raise ApiError(400, f"you must provide {field}", param=field, code="missing_required_parameter")
    return Asked(api=api, raw=raw, stream=bool(body.stream), content=content, body=body, choices=body.n or 1)


def _wrong_type(message: str) -> ApiError:
    """msgspec says ``Expected `bool`, got `str` - at `$.stream` ``; OpenAI clients look for the field in `param`."""
    what, _, where = message.partition(" - at `$.")
    param = where.rstrip("`") or None
    return ApiError(400, f"{param or 'body'}: {what}", param=param, code="invalid_type")


def no_such_page(path: bytes, method: bytes, *, known: bool) -> ApiError:
    shown = path[:100].decode(errors="replace")
    if known:
        return ApiError(405, f"{shown} does not take {method.decode(errors='replace')}", code="method_not_allowed")
    return ApiError(404, f"there is no {shown} here", code="not_found")


def models_page(model: str) -> bytes:
    return msgspec.json.encode(
        {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "trimtab"}]}
    )
