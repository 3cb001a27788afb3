"""The HTTP face of the emulated engine: microserving verbs, OpenAI endpoints, health and metrics."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from engines.emulated.answers import Format
from engines.emulated.engine import Engine
from engines.emulated.generation_response import PlainResponse, StreamResponse
from engines.emulated.openai import Api, Ask, ChatBody, CompletionBody, encode_messages, read_ask
from engines.emulated.streams import PlainAnswer, StreamAnswer
from engines.errors import BadRequest, Draining
from engines.metrics import expose
from engines.protocol import (
    Abort,
    Config,
    Drain,
    PrepRecv,
    PrepRecvAnswer,
    RemoteSend,
    RemoteSendAnswer,
    StartGenerate,
    Tokenize,
    Tokens,
)
from engines.types import EngineInfo, EngineLoad
from engines.verb_http import (
    JsonResponse,
    add_route,
    bind_request_id,
    decode,
    openai_error,
    read_body,
    verb_error,
    while_connected,
)
from engines.verb_spans import span_of, tell_reserved, tell_sent

LONG_BODY_BYTES = 16 * 1024
NewId = Callable[[], str]


def create_app(engine: Engine, registry: CollectorRegistry, max_body_bytes: int, new_id: NewId) -> FastAPI:
    """All routes over one engine. The engine is the caller's: it runs and closes it.

    `new_id` names the requests that come without an id, from OpenAI clients that call an engine directly.
    """
    app = FastAPI(title="Trimtab emulated engine", docs_url=None, redoc_url=None)
    Verbs(engine, max_body_bytes).mount(app)
    OpenAi(engine, max_body_bytes, new_id).mount(app)
    Status(engine, registry).mount(app)
    return app


class Verbs:
    """The eight microserving verbs, and tokenization for routers that cannot do it themselves."""

    def __init__(self, engine: Engine, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    def mount(self, app: FastAPI) -> None:
        verb = "/microserving/"
        add_route(app, "POST", verb + "prep_recv", self.prep_recv, verb_error, PrepRecv, PrepRecvAnswer)
        add_route(app, "POST", verb + "remote_send", self.remote_send, verb_error, RemoteSend, RemoteSendAnswer)
        add_route(app, "POST", verb + "start_generate", self.start_generate, openai_error, StartGenerate, None)
        add_route(app, "POST", verb + "abort", self.abort, verb_error, Abort, None)
        add_route(app, "GET", verb + "info", self.info, verb_error, None, EngineInfo)
        add_route(app, "GET", verb + "load", self.load, verb_error, None, EngineLoad)
        add_route(app, "POST", verb + "config", self.config, verb_error, Config, Config)
        add_route(app, "POST", verb + "drain", self.drain, verb_error, Drain, None)
        add_route(app, "POST", "/tokenize", self.tokenize, verb_error, Tokenize, Tokens)

    async def prep_recv(self, request: Request) -> Response:
        call = await self._body(request, PrepRecv)
        answer = self._engine.prep_recv(call)
        tell_reserved(span_of(request.scope), call, answer, self._engine.info.engine_id)
        return JsonResponse(answer)

    async def remote_send(self, request: Request) -> Response:
        call = await self._body(request, RemoteSend)
        begun_s = self._engine.clocks.monotonic()
        answer = await while_connected(request.receive, self._engine.remote_send(call))
        tell_sent(span_of(request.scope), begun_s, call, answer, self._engine.info.engine_id)
        return JsonResponse(answer)

    async def start_generate(self, request: Request) -> Response:
        call = await self._body(request, StartGenerate)
        ask = await read_ask_aside(self._engine, call.api, bytes(call.body))
        return respond(self._engine, ask, call.request_id, call)

    async def abort(self, request: Request) -> Response:
        self._engine.abort((await self._body(request, Abort)).request_id)
        return JsonResponse({})

    async def info(self, _: Request) -> Response:
        return JsonResponse(self._engine.info)

    async def load(self, _: Request) -> Response:
        return JsonResponse(self._engine.load())

    async def config(self, request: Request) -> Response:
        return JsonResponse(self._engine.config(await self._body(request, Config)))

    async def drain(self, request: Request) -> Response:
        self._engine.drain((await self._body(request, Drain)).on)
        return JsonResponse({"draining": self._engine.draining})

    async def tokenize(self, request: Request) -> Response:
        tokens = self._tokenized(await self._body(request, Tokenize))
        return JsonResponse(Tokens(tokens=tokens, count=len(tokens)))

    def _tokenized(self, asked: Tokenize) -> list[int]:
        if (asked.prompt is None) == (asked.messages is None):
            raise BadRequest("give exactly one of prompt and messages")
        if asked.prompt is not None:
            return self._engine.tokenizer.encode(asked.prompt)
        return encode_messages(
            self._engine.tokenizer,
            _optional(asked.messages, list[dict[str, Any]], "messages") or [],
            _optional(asked.tools, list[dict[str, Any]], "tools"),
            _optional(asked.chat_template_kwargs, dict[str, Any], "chat_template_kwargs"),
        )

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        call = decode(await read_body(request, self._max_body_bytes), kind)
        if (request_id := getattr(call, "request_id", None)) is not None:
            bind_request_id(request_id)
        return call


class OpenAi:
    """What any OpenAI client can call."""

    def __init__(self, engine: Engine, max_body_bytes: int, new_id: NewId) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes
        self._new_id = new_id

    def mount(self, app: FastAPI) -> None:
        add_route(app, "POST", "/v1/completions", self.completions, openai_error, CompletionBody, None)
        add_route(app, "POST", "/v1/chat/completions", self.chat, openai_error, ChatBody, None)
        add_route(app, "GET", "/v1/models", self.models, openai_error, None, None)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def models(self, _: Request) -> Response:
        model = {"id": self._engine.info.model, "object": "model", "created": 0, "owned_by": "trimtab"}
        return JsonResponse({"object": "list", "data": [model]})

    async def _generate(self, request: Request, api: Api) -> Response:
        request_id = self._new_id()
        bind_request_id(request_id)
        raw = await read_body(request, self._max_body_bytes)
        ask = await read_ask_aside(self._engine, api, raw)
        return respond(self._engine, ask, request_id, None)


class Status:
    """Liveness, readiness and metrics."""

    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._registry = registry

    def mount(self, app: FastAPI) -> None:
        add_route(app, "GET", "/health", self.health, verb_error, None, None)
        add_route(app, "GET", "/ready", self.ready, verb_error, None, None)
        add_route(app, "GET", "/metrics", self.metrics, verb_error, None, None)

    async def health(self, _: Request) -> Response:
        """The process lives; that it drains does not change this."""
        return JsonResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """New work is taken."""
        if self._engine.draining:
            raise Draining("this engine is draining")
        return JsonResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        content, content_type = expose(self._registry, request.headers.get("accept"))
        return Response(content, headers={"content-type": content_type})


async def read_ask_aside(engine: Engine, api: Api, raw: bytes) -> Ask:
    """`read_ask`, off the event loop for prompts so long that tokenizing them would hold up the passes."""
    if len(raw) < LONG_BODY_BYTES:
        return read_ask(api, raw, engine.tokenizer, engine.limits)
    return await asyncio.to_thread(read_ask, api, raw, engine.tokenizer, engine.limits)


def respond(engine: Engine, ask: Ask, request_id: str, call: StartGenerate | None) -> Response:
    """Start the generation and give the response that will carry it. `call` is there for the verb."""
    form = Format(ask, request_id, int(engine.clocks.wall()), engine.language)
    given = (call.prompt, call.resume) if call is not None else (None, None)
    if ask.stream:
        events = StreamAnswer(ask, form, with_timings=call is not None)
        return StreamResponse(engine, engine.generate(ask, request_id, events, *given), events)
    plain = PlainAnswer(ask, form)
    return PlainResponse(engine, engine.generate(ask, request_id, plain, *given), plain, with_timings=call is not None)


def _optional(given: Any, kind: Any, name: str) -> Any:
    try:
        return msgspec.convert(given, kind | None)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{name}: {error}") from error
