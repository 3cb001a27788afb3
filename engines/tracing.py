"""Traces: the steps of one request over router and engines, as spans of one tree.

A process that exports no traces, as all do unless told to, hands its caller's trace context on as it came and does
nothing else. Only `make_tracer` knows OpenTelemetry, and imports it only where traces are switched on.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from engines.observability import Observability

TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")

Attributes = Mapping[str, str | bool | int | float | None]
"""What is `None` is left out."""


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context: what a request's next step continues."""

    traceparent: bytes
    tracestate: bytes | None = None

    @classmethod
    def of(cls, headers: Mapping[bytes, bytes]) -> "Trace | None":
        """What came with a request; names of headers are lower case."""
        parent = headers.get(b"traceparent")
        return cls(parent, headers.get(b"tracestate")) if parent is not None else None

    def as_headers(self) -> bytes:
        state = b"tracestate: %b\r\n" % self.tracestate if self.tracestate else b""
        return b"traceparent: %b\r\n%b" % (self.traceparent, state)

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits; `None` if the header is not W3C's."""
        found = TRACEPARENT.fullmatch(self.traceparent)
        return found[1].decode() if found else None


class Span(Protocol):
    """One step of a request, or what stands in for it where there are no traces. Times are monotonic seconds.

    As a context manager it ends with its block, and has failed if the block raises.
    """

    @property
    def is_kept(self) -> bool:
        """Whether anybody will see it: if not, there is no use in gathering what it could say."""
        ...

    @property
    def trace(self) -> Trace | None:
        """What whoever is called in this step continues."""
        ...

    def step(self, name: str) -> "Span":
        """A part of this step that begins now."""
        ...

    def call(self, verb: str, engine_id: str) -> "Span":
        """A part of this step that begins now: an engine is asked something."""
        ...

    def past(self, name: str, begun_s: float, seconds: float | None, attributes: Attributes | None = None) -> None:
        """A part of this step that has ended; `None` seconds: there was none."""
        ...

    def note(self, attributes: Attributes) -> None: ...

    def failed(self, code: str, *, ours: bool = True) -> None:
        """Say what went wrong, if that is not said yet; `ours` is false where the caller was to blame, or left."""
        ...

    def end(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Begins the spans of one process."""

    def begin(self, name: str, trace: Trace | None, begun_s: float) -> Span:
        """A request has arrived. Its span continues the caller's trace, or is the first of a new one."""
        ...


class ClosableTracer(Tracer, Protocol):
    """A tracer whose owner closes it."""

    def close(self) -> None:
        """Send what is left. Blocks, for a few seconds at most."""
        ...


class Untraced:
    """A span that nobody sees; only hands on the caller's trace context."""

    __slots__ = ("trace",)
    is_kept = False

    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace

    def step(self, name: str) -> "Untraced":
        return self

    def call(self, verb: str, engine_id: str) -> "Untraced":
        return self

    def past(self, name: str, begun_s: float, seconds: float | None, attributes: Attributes | None = None) -> None:
        pass

    def note(self, attributes: Attributes) -> None:
        pass

    def failed(self, code: str, *, ours: bool = True) -> None:
        pass

    def end(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


UNTRACED = Untraced(None)


def make_tracer(
    settings: Observability, service: str, instance_id: str, on_lost: Callable[[int], None] = lambda _: None
) -> ClosableTracer | None:
    """What makes the spans of this process; `None` where it exports none.

    `service` and `instance_id` are what a trace viewer shows as the process. `on_lost` is told, from any thread but one
    at a time, of how many spans nobody will see because the collector did not take them.
    """
    if settings.traces_url is None:
        return None
    from engines.otel import OtelTracer

    return OtelTracer(settings.traces_url, settings.traces_ratio, service, instance_id, on_lost)


@asynccontextmanager
async def open_tracer(
    settings: Observability, service: str, instance_id: str, on_lost: Callable[[int], None] = lambda _: None
) -> AsyncIterator[Tracer | None]:
    """`make_tracer` for the time of the block; on exit the last spans are sent."""
    tracer = make_tracer(settings, service, instance_id, on_lost)
    if tracer is None:
        yield None
        return
    async with closing(tracer):
        yield tracer


@asynccontextmanager
async def closing(tracer: ClosableTracer) -> AsyncIterator[None]:
    """Close the tracer after the block, without holding the event loop up."""
    try:
        yield
    finally:
        await asyncio.to_thread(tracer.close)
