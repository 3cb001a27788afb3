"""What the router's span of a request says about it: taken from its record, once that is there."""

from collections.abc import Callable

from controller.router.call import Call
from controller.router.http import Request
from engines.records import Outcome, RequestRecord
from engines.tracing import UNTRACED, Span, Trace, Tracer, Untraced

OPERATIONS = {"chat": "chat", "completions": "text_completion"}
OURS = frozenset({Outcome.FAILED, Outcome.TIMEOUT, Outcome.GAVE_UP, Outcome.SHED, Outcome.NO_ROOM})
"""Outcomes that are the service's failure. A client that leaves, or asks for what makes no sense, is none."""

Begin = Callable[[Request], Span]


def begin_untraced(request: Request) -> Span:
    """Where no traces are exported: the client's trace context is handed on as it came."""
    return Untraced(Trace.of(request.headers)) if b"traceparent" in request.headers else UNTRACED


def beginner(tracer: Tracer | None) -> Begin:
    """What begins the span of each request. Chosen once, so that a router without traces asks no more about them."""
    if tracer is None:
        return begin_untraced

    def begin(request: Request) -> Span:
        path = request.path.decode("latin-1")
        span = tracer.begin(f"POST {path}", Trace.of(request.headers), request.arrived_s)
        span.note({"http.request.method": "POST", "http.route": path, "url.path": path})
        return span

    return begin


def end_refused(span: Span, status: int, code: str | None) -> None:
    """The router could not make sense of the request."""
    span.note({"http.response.status_code": status})
    span.failed(code or str(status), ours=status >= 500)
    span.end()


def end(span: Span, call: Call, record: RequestRecord) -> None:
    knobs = call.plan.knobs
    span.note(
        {
            "http.response.status_code": record.status,
            "gen_ai.operation.name": OPERATIONS[record.api],
            "gen_ai.request.model": call.asked.body.model,
            "gen_ai.request.stream": record.stream,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.response.time_to_first_chunk": record.ttft_s if record.stream else None,
            "trimtab.request.id": record.request_id,
            "trimtab.outcome": record.outcome.value,
            "trimtab.slo.class": record.slo_class,
            "trimtab.plan.version": record.plan_version,
            "trimtab.pattern": record.pattern,
            "trimtab.offload_ratio": knobs.offload_ratio,
            "trimtab.split.begin": record.split_begin,
            "trimtab.split.end": record.split_end,
            "trimtab.engine.prefill": record.prefill_engine,
            "trimtab.engine.decode": record.decode_engine,
            "trimtab.transfer.bytes": record.transferred_bytes,
            "trimtab.transfer.failures": record.transfer_failures,
            "trimtab.attempts": record.attempts,
            "trimtab.resumed": record.resumed,
        }
    )
    if record.outcome is not Outcome.OK:
        span.failed(record.error_code or record.outcome.value, ours=record.outcome in OURS)
    span.end()
