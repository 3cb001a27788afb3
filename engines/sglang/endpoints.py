"""HTTP routes of the microserving verbs on SGLang's own server. No SGLang in here."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

import orjson
import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from engines.errors import BadRequest, Draining, EngineError
from engines.metrics import expose
from engines.protocol import (
    TIMINGS_HEADER,
    Abort,
    Config,
    Drain,
    PrepRecv,
    PrepRecvAnswer,
    RemoteSend,
    RemoteSendAnswer,
    StartGenerate,
)
from engines.sglang.engine import Engine
from engines.sglang.generate import Generation, check_resume, refused
from engines.sglang.peers import KV_HELD, KV_PEER
from engines.sglang.wire import KvHeld, Peer
from engines.tracing import Span
from engines.types import EngineInfo, EngineLoad, EngineTimings
from engines.verb_http import (
    ClientLeft,
    JsonResponse,
    add_route,
    bind_request_id,
    decode,
    openai_error,
    read_body,
    verb_error,
    while_connected,
)
from engines.verb_spans import span_of, tell_generated, tell_reserved, tell_sent

log = structlog.get_logger(__name__)
VERB = "/microserving/"
WORK_PREFIXES = ("/v1/", "/generate", "/invocations", "/vertex_generate", "/encode", "/api/")
"""SGLang's own routes that begin work: refused while draining."""


class Serves(Protocol):
    async def serve(self, api: str, body: Any, rid: str, observer: Any, raw_request: Any) -> Any: ...


class Verbs:
    """The eight verbs, and what engines of this kind ask each other."""

    def __init__(self, engine: Engine, serving: Serves, max_body_bytes: int) -> None:
        self._engine = engine
        self._serving = serving
        self._max_body_bytes = max_body_bytes

    def router(self) -> APIRouter:
        router = APIRouter()
        add_route(router, "POST", VERB + "prep_recv", self.prep_recv, verb_error, PrepRecv, PrepRecvAnswer)
        add_route(router, "POST", VERB + "remote_send", self.remote_send, verb_error, RemoteSend, RemoteSendAnswer)
        add_route(router, "POST", VERB + "start_generate", self.start_generate, openai_error, StartGenerate, None)
        add_route(router, "POST", VERB + "abort", self.abort, verb_error, Abort, None)
        add_route(router, "GET", VERB + "info", self.info, verb_error, None, EngineInfo)
        add_route(router, "GET", VERB + "load", self.load, verb_error, None, EngineLoad)
        add_route(router, "POST", VERB + "config", self.config, verb_error, Config, Config)
        add_route(router, "POST", VERB + "drain", self.drain, verb_error, Drain, None)
        add_route(router, "POST", VERB + KV_PEER, self.kv_peer, verb_error, None, None)
        add_route(router, "POST", VERB + KV_HELD, self.kv_held, verb_error, None, None)
        return router

    async def prep_recv(self, request: Request) -> Response:
        call: PrepRecv = await self._body(request, PrepRecv)
        answer = await self._engine.prep_recv(call)
        tell_reserved(span_of(request.scope), call, answer, self._engine.info.engine_id)
        return JsonResponse(answer)

    async def remote_send(self, request: Request) -> Response:
        call: RemoteSend = await self._body(request, RemoteSend)
        self._engine.check_takes_work()
        self._engine.check_tokens(call.prompt)
        begun_s = self._engine.now_s()
        answer = await while_connected(request.receive, self._engine.sending.send(call))
        tell_sent(span_of(request.scope), begun_s, call, answer, self._engine.info.engine_id)
        return JsonResponse(answer)

    async def start_generate(self, request: Request) -> Response:
        call: StartGenerate = await self._body(request, StartGenerate)
        body = _object(bytes(call.body))
        check_resume(call, body)
        generation = self._engine.begin_generation(call, body)
        return GenerationResponse(self._engine, self._serving, generation, body, request)

    async def abort(self, request: Request) -> Response:
        call: Abort = await self._body(request, Abort)
        await self._engine.abort(call.request_id)
        return JsonResponse({})

    async def info(self, _: Request) -> Response:
        return JsonResponse(self._engine.info)

    async def load(self, _: Request) -> Response:
        return JsonResponse(await self._engine.load())

    async def config(self, request: Request) -> Response:
        call: Config = await self._body(request, Config)
        return JsonResponse(await self._engine.config(call))

    async def drain(self, request: Request) -> Response:
        call: Drain = await self._body(request, Drain)
        await self._engine.drain(call.on)
        return JsonResponse({"draining": self._engine.draining})

    async def kv_peer(self, request: Request) -> Response:
        peer: Peer = await self._body(request, Peer)
        await self._engine.peers.meet_caller(peer)
        return JsonResponse(self._engine.me)

    async def kv_held(self, request: Request) -> Response:
        asked: KvHeld = await self._body(request, KvHeld)
        await self._engine.check_held(asked)
        return JsonResponse({})

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        call = decode(await read_body(request, self._max_body_bytes), kind)
        if (request_id := getattr(call, "request_id", None)) is not None:
            bind_request_id(request_id)
        return call


class GenerationResponse(Response):
    """SGLang's answer to one `start_generate`, with our timings. Ends the generation whatever happens."""

    def __init__(self, engine: Engine, serving: Serves, generation: Generation, body: Any, request: Request) -> None:
        super().__init__()
        self._engine = engine
        self._serving = serving
        self._generation = generation
        self._body = body
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        through = False
        status = 200
        begun_s = self._engine.now_s()
        try:
            answer = await while_connected(receive, self._answer())
            status = answer.status_code
            await answer(scope, receive, send)
            through = True
        except ClientLeft:
            log.info("a client left", request_id=self._generation.call.request_id)
        finally:
            self._engine.end_generation(self._generation, left=not through)
            if (span := span_of(scope)).is_kept and status < 400:
                self._tell(span, begun_s, self._generation.timings() if through else None)

    def _tell(self, span: Span, begun_s: float, timings: EngineTimings | None) -> None:
        tell_generated(span, begun_s, self._generation.call.request_id, timings, self._engine.info.engine_id)

    async def _answer(self) -> Response:
        generation = self._generation
        try:
            answer = await self._serving.serve(
                generation.call.api, self._body, generation.rid, generation, self._request
            )
        except ValidationError as error:
            return openai_error(_bad_body(error))
        except (EngineError, ValueError) as error:
            return openai_error(error if isinstance(error, EngineError) else BadRequest(str(error)))
        if not isinstance(answer, Response):
            return self._plain(answer.model_dump_json(by_alias=True).encode())
        if answer.status_code >= 400:
            return openai_error(refused(answer.status_code, bytes(answer.body)))
        chunks = getattr(answer, "body_iterator", None)
        return self._plain(bytes(answer.body)) if chunks is None else self._stream(chunks)

    def _plain(self, document: bytes) -> Response:
        headers = {TIMINGS_HEADER: _encode_timings(self._generation)}
        return Response(self._generation.plain(document), media_type="application/json", headers=headers)

    def _stream(self, chunks: AsyncGenerator[Any, None]) -> Response:
        return EventStream(self._generation.events(chunks))


class EventStream(Response):
    """Events as they come; ends when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await while_connected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._events.aclose()


class Gate:
    """While the engine drains, SGLang's own endpoints take no new work either, and it is not ready."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._engine.draining and scope["type"] == "http" and _is_work(scope):
            refusal = openai_error(Draining("this engine is draining: send new work elsewhere", retry_after_s=1.0))
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def add_metrics(app: FastAPI, registry: CollectorRegistry, refresh: Callable[[], Awaitable[object]]) -> None:
    """`GET /metrics`, where SGLang does not serve it; `refresh` has the scheduler tell its numbers."""

    async def metrics(request: Request) -> Response:
        await refresh()
        content, content_type = expose(registry, request.headers.get("accept"))
        return Response(content, headers={"content-type": content_type})

    app.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)


def _is_work(scope: Scope) -> bool:
    path: str = scope["path"]
    if path == "/ready":
        return True
    return scope["method"] == "POST" and path.startswith(WORK_PREFIXES) and not path.startswith("/v1/tokenize")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("body must be a JSON object")
    return found


def _encode_timings(generation: Generation) -> str:
    return orjson.dumps(_plain_timings(generation)).decode()


def _plain_timings(generation: Generation) -> dict[str, Any]:
    timings = generation.timings()
    return {name: getattr(timings, name) for name in timings.__struct_fields__}


class BadField(BadRequest):
    """A client's body is wrong; `param` names the field."""

    code = "bad_request"

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


def _bad_body(error: ValidationError) -> BadField:
    fault = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in fault["loc"]]
    return BadField(f"{'.'.join(path) or 'body'}: {fault['msg']}", path[0] if path else None)
