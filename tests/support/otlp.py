"""A collector that takes spans by OTLP over HTTP on loopback, and what tests ask of it."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tests.support.fleet import until

KINDS = {WireSpan.SPAN_KIND_SERVER: "server", WireSpan.SPAN_KIND_CLIENT: "client", WireSpan.SPAN_KIND_INTERNAL: "step"}

BALANCED = """\
POST /v1/completions (server, r0)
  tokenize
  POST /microserving/prep_recv (client, r0)
    POST /microserving/prep_recv (server, e1)
  POST /microserving/remote_send (client, r0)
    POST /microserving/remote_send (server, e0)
      queue
      prefill
      transfer
  POST /microserving/start_generate (client, r0)
    POST /microserving/start_generate (server, e1)
      queue
      prefill
      decode"""
"""One request that is split, through router `r0`, prefill engine `e0` and decode engine `e1`."""


@dataclass(frozen=True)
class SeenSpan:
    process: str
    """The instance that sent it: an engine's or a router's id."""
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    begun_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]
    tracestate: str

    @property
    def label(self) -> str:
        """Of a part, its name alone: it is where its parent is."""
        return f"{self.name} ({self.kind}, {self.process})" if self.kind != "step" else self.name


@dataclass
class Collector:
    """Spans in the order they came. While `status` is not 200 it refuses all of them."""

    url: str = ""
    status: int = 200
    refused: int = 0
    """Batches."""
    spans: list[SeenSpan] = field(default_factory=list)

    def of(self, trace_id: str) -> list[SeenSpan]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    async def tree(self, trace_id: str, spans: int, within_s: float = 30.0) -> "Tree":
        """The whole trace, once so many spans of it are there."""
        await until(lambda: len(self.of(trace_id)) >= spans, f"{spans} spans of the trace", within_s)
        return Tree(self.of(trace_id))


class Tree:
    """One trace."""

    def __init__(self, spans: list[SeenSpan]) -> None:
        self.spans = sorted(spans, key=lambda span: span.begun_ns)
        known = {span.span_id for span in spans}
        self.roots = [span for span in self.spans if span.parent_id not in known]

    def children(self, span: SeenSpan) -> list[SeenSpan]:
        return [each for each in self.spans if each.parent_id == span.span_id]

    def named(self, name: str, kind: str) -> SeenSpan:
        (found,) = [span for span in self.spans if (span.name, span.kind) == (name, kind)]
        return found

    def drawn(self) -> str:
        """One line a span, indented below its parent, in order of their beginning."""
        return "\n".join(line for root in self.roots for line in self._lines(root, 0))

    def _lines(self, span: SeenSpan, depth: int) -> Iterator[str]:
        yield "  " * depth + span.label
        for child in self.children(span):
            yield from self._lines(child, depth + 1)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port, served by a thread."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if collector.status == 200:
                collector.spans += _read(ExportTraceServiceRequest.FromString(body))
            else:
                collector.refused += 1
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    return [
        _seen(of_process, span)
        for of_process in request.resource_spans
        for scope in of_process.scope_spans
        for span in scope.spans
    ]


def _seen(of_process: ResourceSpans, span: WireSpan) -> SeenSpan:
    resource = {each.key: _value(each.value) for each in of_process.resource.attributes}
    return SeenSpan(
        process=resource["service.instance.id"],
        service=resource["service.name"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=KINDS[span.kind],
        begun_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes={each.key: _value(each.value) for each in span.attributes},
        tracestate=span.trace_state,
    )


def _value(wire: AnyValue) -> Any:
    return getattr(wire, wire.WhichOneof("value"))
