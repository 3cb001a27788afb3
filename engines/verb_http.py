"""HTTP around the verbs: routes, reading bodies within a limit, answering errors, noticing that a client left."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import orjson
import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Receive
from structlog.contextvars import bind_contextvars

from engines.errors import BadRequest, BodyTooLarge, EngineError
from engines.tracing import Trace
from engines.verb_spans import span_of

Body = TypeVar("Body")
Result = TypeVar("Result")
SCHEMA_REF = "#/components/schemas/{name}"
log = structlog.get_logger(__name__)


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class JsonResponse(Response):
    """msgspec structs and plain data as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `BodyTooLarge` as soon as it is known to be, `ClientLeft`."""
    too_large = BodyTooLarge(f"the body is over {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(parts)


def decode(raw: bytes, kind: type[Body]) -> Body:
    """The body of a verb. Raises `BadRequest`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not a {kind.__name__}: {error}") from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` unless the client leaves first; then cancel it and raise `ClientLeft`."""
    task = asyncio.ensure_future(work)
    watch = watch_client(receive, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done() and not watch.cancelled():
            raise ClientLeft from None
        task.cancel()
        raise
    finally:
        watch.cancel()


def watch_client(receive: Receive, on_left: Callable[[], object]) -> asyncio.Task[None]:
    """Call `on_left` when the client closes its connection. Cancel the task to stop watching."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_left()

    return asyncio.ensure_future(watch())


def error_headers(error: EngineError) -> dict[str, str]:
    """`Retry-After` knows whole seconds only; `retry-after-ms` says the same exactly, as OpenAI's clients read it."""
    if error.retry_after_s is None:
        return {}
    whole_s = max(1, math.ceil(error.retry_after_s))
    return {"retry-after": str(whole_s), "retry-after-ms": str(math.ceil(error.retry_after_s * 1000))}


def verb_error(error: EngineError) -> Response:
    document = {"error": {"code": error.code, "message": error.message}}
    return Response(orjson.dumps(document), error.status, error_headers(error), "application/json")


def openai_error(error: EngineError) -> Response:
    """The shape that OpenAI's clients expect; it has a verb error's fields too."""
    known = {404: "not_found_error", 429: "rate_limit_error"}
    kind = known.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = getattr(error, "param", None) or PARAMS.get(error.code)
    document = {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}
    return Response(orjson.dumps(document), error.status, error_headers(error), "application/json")


PARAMS = {"model_not_found": "model"}

Handler = Callable[[Request], Awaitable[Response]]


def answering_errors(handler: Handler, shape: Callable[[EngineError], Response]) -> Handler:
    """`handler` with its engine errors answered in `shape`; anything unforeseen is logged and is a 500 in it too."""

    async def guarded(request: Request) -> Response:
        _bind_trace_id(request)
        try:
            return await handler(request)
        except EngineError as error:
            span_of(request.scope).failed(error.code, ours=error.status >= 500)
            return shape(error)
        except ClientLeft:
            span_of(request.scope).failed("client_left", ours=False)
            return Response(status_code=499)
        # The last stop before the socket: one request's defect must not look like a dead engine.
        except Exception:
            log.exception("defect", path=request.url.path)
            span_of(request.scope).failed("defect")
            return shape(EngineError("the engine failed on this request; its log says why"))

    guarded.__name__, guarded.__doc__ = handler.__name__, handler.__doc__
    return guarded


def bind_request_id(request_id: str) -> None:
    """Have every log line of the task that serves this request, and of those it starts, name the request."""
    bind_contextvars(request_id=request_id)


def _bind_trace_id(request: Request) -> None:
    parent = request.headers.get("traceparent")
    trace_id = Trace(parent.encode("latin-1")).trace_id if parent is not None else None
    if trace_id is not None:
        bind_contextvars(trace_id=trace_id)


def add_route(
    app: FastAPI | APIRouter,
    method: str,
    path: str,
    handler: Handler,
    shape: Callable[[EngineError], Response],
    body: type[Any] | None,
    answer: type[Any] | None,
) -> None:
    """Bodies are decoded by msgspec, so FastAPI only learns their schemas for its OpenAPI document."""
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
    responses: dict[int | str, dict[str, Any]] = {}
    if answer is not None:
        responses[200] = {"content": {"application/json": {"schema": _schema(answer)}}}
    app.add_api_route(
        path,
        answering_errors(handler, shape),
        methods=[method],
        response_model=None,
        openapi_extra=extra or None,
        responses=responses or None,
    )


def _schema(kind: type[Any]) -> dict[str, Any]:
    """A self-contained JSON schema: what it refers to is inlined, as none of ours refers to itself."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=SCHEMA_REF)
    inlined: dict[str, Any] = _inlined(schema, components)
    return inlined


def _inlined(node: Any, components: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, components) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(ref := node.get("$ref"), str):
        return _inlined(components[ref.rpartition("/")[2]], components)
    return {key: _inlined(value, components) for key, value in node.items()}
