"""Generations as ASGI responses, written by hand: one event a token must cost little."""

from fastapi import Response
from starlette.types import Receive, Scope, Send

from engines.emulated.engine import Engine
from engines.emulated.generation import Generation
from engines.emulated.streams import PlainAnswer, StreamAnswer
from engines.protocol import TIMINGS_HEADER
from engines.verb_http import watch_client
from engines.verb_spans import span_of, tell_generated

SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class StreamResponse(Response):
    """Writes events as they come, the head with the first of them. A client that leaves ends the generation."""

    def __init__(self, engine: Engine, generation: Generation, answer: StreamAnswer) -> None:
        super().__init__()
        self._engine = engine
        self._generation = generation
        self._answer = answer
        self._begun_s = engine.clocks.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = watch_client(receive, lambda: self._engine.leave(self._generation))
        try:
            data = await self._answer.read()
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await self._answer.read()
            await send({"type": "http.response.body", "body": b""})
        finally:
            watch.cancel()
            self._generation.abort()
            _tell(scope, self._engine, self._generation, self._begun_s)


class PlainResponse(Response):
    """Writes the whole answer once it is there."""

    def __init__(self, engine: Engine, generation: Generation, answer: PlainAnswer, *, with_timings: bool) -> None:
        super().__init__()
        self._engine = engine
        self._generation = generation
        self._answer = answer
        self._begun_s = engine.clocks.monotonic()
        self._with_timings = with_timings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = watch_client(receive, lambda: self._engine.leave(self._generation))
        try:
            document, timings = await self._answer.read()
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(document))]
            if self._with_timings:
                headers.append((TIMINGS_HEADER.encode(), timings))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": document})
        finally:
            watch.cancel()
            self._generation.abort()
            _tell(scope, self._engine, self._generation, self._begun_s)


def _tell(scope: Scope, engine: Engine, generation: Generation, begun_s: float) -> None:
    tell_generated(span_of(scope), begun_s, generation.request_id, generation.timings, engine.info.engine_id)
