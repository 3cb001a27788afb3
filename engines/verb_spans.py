"""Spans of an engine's HTTP server: one for each request that is work, and in it the parts that were measured."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.protocol import PrepRecv, PrepRecvAnswer, RemoteSend, RemoteSendAnswer
from engines.tracing import UNTRACED, Span, Trace, Tracer
from engines.types import EngineTimings

KEY = "trimtab.span"
VERBS = ("prep_recv", "remote_send", "start_generate", "abort")
WORK = frozenset({*(f"/microserving/{verb}" for verb in VERBS), "/tokenize", "/v1/completions", "/v1/chat/completions"})


class Traced:
    """ASGI middleware, only there where traces are switched on. Handlers find their span with `span_of`."""

    def __init__(self, app: ASGIApp, tracer: Tracer, now_s: Callable[[], float]) -> None:
        self._app = app
        self._tracer = tracer
        self._now_s = now_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in WORK:
            await self._app(scope, receive, send)
            return
        with self._tracer.begin(f"POST {scope['path']}", Trace.of(dict(scope["headers"])), self._now_s()) as span:
            span.note({"http.request.method": "POST", "http.route": scope["path"], "url.path": scope["path"]})
            scope[KEY] = span

            async def send_noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _answered(span, message["status"])
                await send(message)

            await self._app(scope, receive, send_noting)


def span_of(scope: Scope) -> Span:
    """The span of the request that `scope` belongs to."""
    span: Span = scope.get(KEY, UNTRACED)
    return span


def _answered(span: Span, status: int) -> None:
    span.note({"http.response.status_code": status})
    if status >= 500:
        span.failed(str(status))


def tell_reserved(span: Span, call: PrepRecv, answer: PrepRecvAnswer, engine_id: str) -> None:
    span.note(
        {
            "trimtab.request.id": call.request_id,
            "trimtab.engine.id": engine_id,
            "trimtab.split.begin": answer.prefix_matched_length,
            "trimtab.split.end": call.end,
            "gen_ai.usage.input_tokens": len(call.prompt),
        }
    )


def tell_sent(span: Span, begun_s: float, call: RemoteSend, answer: RemoteSendAnswer, engine_id: str) -> None:
    """The parts of a `remote_send` that began at `begun_s`, monotonic: one after the other, as they were measured."""
    span.note(
        {
            "trimtab.request.id": call.request_id,
            "trimtab.engine.id": engine_id,
            "trimtab.split.begin": call.begin,
            "trimtab.split.end": call.end,
            "trimtab.transfer.bytes": answer.bytes,
            "gen_ai.usage.input_tokens": len(call.prompt),
            "gen_ai.usage.cache_read.input_tokens": answer.cached_length,
        }
    )
    computed = {"trimtab.prefill.tokens": max(0, call.end - answer.cached_length)}
    sent = {"trimtab.transfer.bytes": answer.bytes, "trimtab.transfer.tokens": call.end - call.begin}
    span.past("queue", begun_s, answer.queue_s)
    span.past("prefill", begun_s + answer.queue_s, answer.prefill_s - answer.queue_s, computed)
    span.past("transfer", begun_s + answer.prefill_s, answer.transfer_s, sent)


def tell_generated(span: Span, begun_s: float, request_id: str, timings: EngineTimings | None, engine_id: str) -> None:
    """The parts of a generation that began at `begun_s`, monotonic; without timings it broke off."""
    span.note({"trimtab.request.id": request_id, "trimtab.engine.id": engine_id})
    if timings is None:
        span.failed("broken_off", ours=False)
        return
    span.note(
        {
            "gen_ai.usage.input_tokens": timings.prompt_tokens,
            "gen_ai.usage.output_tokens": timings.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": timings.cached_tokens,
            "trimtab.tokens_agree": timings.tokens_agree,
        }
    )
    computed = {"trimtab.prefill.tokens": max(0, timings.prompt_tokens - timings.cached_tokens)}
    span.past("queue", begun_s, timings.queue_s)
    span.past("prefill", begun_s + timings.queue_s, timings.prefill_s, computed)
    span.past("decode", begun_s + timings.queue_s + timings.prefill_s, timings.decode_s)
