"""Spans by OpenTelemetry's SDK, sent in batches by a thread of its own. Imported only where traces are switched on.

A collector that is away costs its spans and nothing else: what waits for it is bounded.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import TracebackType
from typing import Self

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OtelApiSpan
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace import Tracer as OtelApiTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engines.tracing import Attributes, Span, Trace, Untraced

log = structlog.get_logger(__name__)

WAITING_SPANS = 8192
"""More than this many are not kept for a collector that does not keep up."""
BATCH_SPANS = 512
EVERY_MS = 1000
EXPORT_S = 3.0
"""How long a collector may take for one batch, retries included; also about how long it can hold up the end."""
SAY_THEMSELVES = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of the SDK that have a line for each lost batch."""
NANOSECONDS = 1_000_000_000
NOBODYS_FAULT = (asyncio.CancelledError, GeneratorExit)

_propagator = TraceContextTextMapPropagator()


class OtelTracer:
    """The `Tracer` of one process. Owns the exporting thread; `close` it, which may take a few seconds."""

    def __init__(self, url: str, ratio: float, service: str, instance_id: str, on_lost: Callable[[int], None]) -> None:
        """`url` is the whole address that batches are posted to. Further settings of the exporter, such as headers,
        come from OpenTelemetry's own environment (`OTEL_EXPORTER_OTLP_HEADERS`)."""
        for name in SAY_THEMSELVES:
            logging.getLogger(name).disabled = True
        resource = {"service.name": service, "service.instance.id": instance_id, "service.version": version("trimtab")}
        self._exporter = _Exporter(OTLPSpanExporter(url, timeout=EXPORT_S), url, on_lost)
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(ratio)), Resource.create(resource), shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Processor(self._exporter))
        self._make = self._provider.get_tracer("trimtab", version("trimtab"))

    def begin(self, name: str, trace: Trace | None, begun_s: float) -> Span:
        offset_ns = time.time_ns() - time.monotonic_ns()
        at_ns = round(begun_s * NANOSECONDS) + offset_ns
        span = self._make.start_span(name, _context_of(trace), SpanKind.SERVER, start_time=at_ns)
        if not span.is_recording():
            return Untraced(_trace_of(span.get_span_context()))
        return OtelSpan(self._make, span, offset_ns)

    def close(self) -> None:
        """Send what is left, unless the collector was away the last time. Blocks."""
        self._exporter.closing = True
        self._provider.shutdown()


class OtelSpan:
    """A span that is recorded. `offset_ns` turns this process's monotonic time into Unix time."""

    __slots__ = ("_failed", "_make", "_offset_ns", "_span")
    is_kept = True

    def __init__(self, make: OtelApiTracer, span: OtelApiSpan, offset_ns: int) -> None:
        self._make = make
        self._span = span
        self._offset_ns = offset_ns
        self._failed = False

    @property
    def trace(self) -> Trace | None:
        return _trace_of(self._span.get_span_context())

    def step(self, name: str) -> "OtelSpan":
        return self._child(name, SpanKind.INTERNAL)

    def call(self, verb: str, engine_id: str) -> "OtelSpan":
        path = f"/microserving/{verb}"
        child = self._child(f"POST {path}", SpanKind.CLIENT)
        child.note({"http.request.method": "POST", "url.template": path, "trimtab.engine.id": engine_id})
        return child

    def past(self, name: str, begun_s: float, seconds: float | None, attributes: Attributes | None = None) -> None:
        if seconds is None:
            return
        at_ns = round(begun_s * NANOSECONDS) + self._offset_ns
        context = set_span_in_context(self._span, Context())
        span = self._make.start_span(name, context, start_time=at_ns)
        span.set_attributes(_given(attributes or {}))
        span.end(at_ns + round(max(0.0, seconds) * NANOSECONDS))

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(_given(attributes))

    def failed(self, code: str, *, ours: bool = True) -> None:
        if self._failed:
            return
        self._failed = True
        self._span.set_attribute("error.type", code)
        if ours:
            self._span.set_status(Status(StatusCode.ERROR, code))

    def end(self) -> None:
        self._span.end(time.monotonic_ns() + self._offset_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed(_code_of(error), ours=not isinstance(error, NOBODYS_FAULT))
        self.end()

    def _child(self, name: str, kind: SpanKind) -> "OtelSpan":
        context = set_span_in_context(self._span, Context())
        begun_ns = time.monotonic_ns() + self._offset_ns
        return OtelSpan(self._make, self._make.start_span(name, context, kind, start_time=begun_ns), self._offset_ns)


class _Processor(BatchSpanProcessor):
    """Refuses, and counts, what there is no room for, rather than having older spans dropped unseen."""

    def __init__(self, exporter: "_Exporter") -> None:
        super().__init__(exporter, WAITING_SPANS, EVERY_MS, BATCH_SPANS)
        self._own_exporter = exporter
        self._taken = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._taken - self._own_exporter.handled >= WAITING_SPANS:
            self._own_exporter.lose(1)
            return
        self._taken += 1
        super().on_end(span)


class _Exporter(SpanExporter):
    """Says once that the collector is away and once that it is back, and counts what was lost meanwhile."""

    def __init__(self, inner: SpanExporter, url: str, on_lost: Callable[[int], None]) -> None:
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self.handled = 0
        """Spans that were sent or lost."""
        self.closing = False
        self._inner = inner
        self._url = url
        self._away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        given_up = self.closing and self._away
        try:
            result = SpanExportResult.FAILURE if given_up else self._inner.export(spans)
        finally:
            self.handled += len(spans)
        self._saw(result is not SpanExportResult.SUCCESS, len(spans))
        return result

    def lose(self, spans: int) -> None:
        with self._lock:
            self._on_lost(spans)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def _saw(self, away: bool, spans: int) -> None:
        if away:
            self.lose(spans)
        if away and not self._away:
            log.warning("traces_not_taken", url=self._url, spans_lost=spans)
        elif self._away and not away:
            log.info("traces_taken_again", url=self._url)
        self._away = away


def _context_of(trace: Trace | None) -> Context:
    """The caller's span, if its header is W3C's; else a new trace begins."""
    if trace is None:
        return Context()
    carrier = {"traceparent": trace.traceparent.decode("latin-1")}
    if trace.tracestate is not None:
        carrier["tracestate"] = trace.tracestate.decode("latin-1")
    return _propagator.extract(carrier)


def _trace_of(context: SpanContext) -> Trace:
    ids = f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"
    state = context.trace_state.to_header().encode("latin-1") if context.trace_state else None
    return Trace(ids.encode(), state)


def _code_of(error: BaseException) -> str:
    """A word, never the message: that may quote a request."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else type(error).__qualname__


def _given(attributes: Attributes) -> dict[str, str | bool | int | float]:
    return {name: value for name, value in attributes.items() if value is not None}
