"""The client side of the router: HTTP/1.1 on raw `asyncio.Protocol`, one request at a time per connection.

Parser callbacks build a `Request`; the handler answers through the connection: `respond` for a whole answer, or
`start`, `write`, `end` for a stream, whose pieces are framed and written without any coroutine. Everything a client
can make the router hold is bounded, and every wait for a client has a deadline.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

import httptools

from controller.settings import Limits

NO_UPGRADE = "this server does not upgrade connections: have the client speak plain HTTP/1.1"
HIGH_WATER_BYTES = 64 * 1024
LINGER_S = 2.0
SEPARATORS_BYTES = len(": \r\n")
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
Headers = bytes
"""Further header lines, each ended by CRLF."""


class Request:
    """A complete request. Header names are lower case; a header that came twice is joined with a comma."""

    __slots__ = ("arrived_s", "body", "headers", "method", "path", "target")

    def __init__(
        self, method: bytes, target: bytes, headers: dict[bytes, bytes], body: bytes, arrived_s: float
    ) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0] if b"?" in target else target
        self.headers = headers
        self.body = body
        self.arrived_s = arrived_s
        """When its first byte was read, on the server's clock."""


class Flow(Protocol):
    """Whoever produces a stream; told to stop and go on as the client keeps up or does not."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


Gate = Callable[[bytes, Mapping[bytes, bytes]], tuple[int, str] | None]
"""Looks at target and headers before any body is taken in: the status and sentence to refuse with, or `None`."""


class Handler(Protocol):
    def __call__(self, request: Request, client: "ClientConnection") -> asyncio.Task[None] | None:
        """Answer a request now, or return the task that will. The task is cancelled if the client leaves."""
        ...


class ClientConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.loop
        self._now_s = server.now_s
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Request, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._flow: Flow | None = None
        self._busy = False
        self._keep_alive = True
        self._chunked = True
        self._bodyless = False
        self._closing = False
        self._in_headers = False
        self._in_trailers = False
        self._deaf = False
        self._full = False
        self._header_bytes = 0
        self.deadline_s = self._now_s() + self._limits.header_s
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._header_bytes = 0
        self._in_trailers = False
        self._arrived_s = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send = self._transport.write  # type: ignore[union-attr]
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)  # type: ignore[union-attr]
        if not self._server.joined(self):
            self.refuse(503, "the router has as many connections as it allows")

    def data_received(self, data: bytes) -> None:
        if self._closing or self._deaf:
            return
        if not self._arrived_s:
            self._arrived_s = self._now_s()
            self._in_headers = True
            self._wait_for_client(self._limits.header_s)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.refuse(400, NO_UPGRADE)
        except httptools.HttpParserCallbackError:
            raise  # a fault of ours, not of the client
        except httptools.HttpParserError as error:
            self.refuse(400, f"malformed HTTP request: {error}")
        if self._in_headers:
            self._header_bytes += len(data)
            self._check_header_size()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._flow = None
        self._waiting.clear()
        self._server.left(self)
        if self._task is not None:
            self._task.cancel("the client left")

    def pause_writing(self) -> None:
        """The client is slow: produce no more for it and take no more from it."""
        self._full = True
        self.deadline_s = self._now_s() + self._limits.send_s
        self._transport.pause_reading()  # type: ignore[union-attr]
        if self._flow is not None:
            self._flow.pause()

    def resume_writing(self) -> None:
        self._full = False
        self.deadline_s = float("inf")
        if self._flow is not None:
            self._flow.resume()
        if not self._busy:
            self._ready_for_more()
        elif not self._waiting:
            self._transport.resume_reading()  # type: ignore[union-attr]

    # httptools callbacks

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + SEPARATORS_BYTES
        if self._in_trailers:
            self._check_header_size()  # counted and dropped: a trailer must not pass for a header
            return
        name = name.lower()
        seen = self._headers.get(name)
        self._headers[name] = value if seen is None else seen + b", " + value

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._in_trailers = True
        self._header_bytes += len(self._target)
        self._check_header_size()
        self._wait_for_client(self._limits.body_s)
        length = self._headers.get(b"content-length", b"0")
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self.refuse(400, f"this server speaks HTTP/1.1, not {version}")
        elif version == "1.1" and b"host" not in self._headers:
            self.refuse(400, "a request needs a Host header")
        elif length.isdigit() and int(length) > self._limits.body_bytes:
            self._refuse_large_body()
        elif (refused := self._server.gate(self._target, self._headers)) is not None:
            self.refuse(*refused)
        elif self._parser.should_upgrade():
            self.refuse(400, NO_UPGRADE)
        elif b"expect" in self._headers:
            self._answer_expectation(self._headers[b"expect"])

    def on_body(self, body: bytes) -> None:
        if self._closing:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_large_body()
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._closing:
            return
        request = Request(
            self._parser.get_method(),
            self._target,
            self._headers,
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
            self._arrived_s or self._now_s(),
        )
        keep_alive = self._parser.should_keep_alive()
        modern = self._parser.get_http_version() == "1.1"
        self._reset()
        if self._busy or self._full or self._waiting:
            self._waiting.append((request, keep_alive and modern))
            self._transport.pause_reading()  # type: ignore[union-attr]
        else:
            self._begin(request, keep_alive, modern)

    # for the handler

    def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", extra: Headers = b""
    ) -> None:
        """Send a whole answer."""
        head = self._head(status, content_type, extra, b"content-length: %d" % len(body))
        self._write(b"%b\r\n%b" % (head, b"" if self._bodyless else body))
        self._finished()

    def start(self, status: int, content_type: bytes, first: bytes, flow: Flow, extra: Headers = b"") -> None:
        """Begin a streamed answer with its first piece; `flow` is paused while the client is slow."""
        self.follow(flow)
        framing = b"transfer-encoding: chunked" if self._chunked else b"cache-control: no-cache"
        self._write(b"%b\r\n%b" % (self._head(status, content_type, extra, framing), self._framed(first)))

    def follow(self, flow: Flow) -> None:
        """From now on `flow` is what makes the streamed answer."""
        self._flow = flow
        if self._full:
            flow.pause()

    def write(self, data: bytes) -> None:
        """Send the next piece of a stream."""
        if not self._closing:
            self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """End a stream."""
        if self._chunked:
            self._write(b"0\r\n\r\n")
        self._finished()

    # for the server

    def expire(self) -> None:
        """The deadline has passed: close, saying why if half a request had arrived."""
        if self._busy or self._closing:
            self.abort()
        elif self._arrived_s:
            self.refuse(408, "the request did not arrive in time")
        else:
            self._close()

    def abort(self) -> None:
        """Drop the connection now."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def finish_and_close(self) -> None:
        """Take no further request; close now, or when the request that has begun is answered."""
        self._keep_alive = False
        if not self._busy and not self._arrived_s:
            self._close()

    def refuse(self, status: int, sentence: str) -> None:
        """Answer what cannot be served as HTTP, and close; not before an answer that is under way is complete."""
        if self._closing or self._deaf:
            return
        self._keep_alive = False
        if self._busy or self._waiting:
            self._deaf = True
            return
        body, extra = self._server.refusal(status, sentence)
        length = b"content-length: %d" % len(body)
        self._write(b"%b\r\n%b" % (self._head(status, b"application/json", extra, length), body))
        self._linger()

    # inside

    def _begin(self, request: Request, keep_alive: bool, modern: bool) -> None:
        self._busy = True
        self._bodyless = request.method == b"HEAD"
        self.deadline_s = float("inf")
        self._chunked = modern
        # A stream to an HTTP/1.0 client has no chunks, so only closing can end it.
        self._keep_alive = self._keep_alive and keep_alive and modern
        self._task = self._server.handler(request, self)

    def _finished(self) -> None:
        self._busy = False
        self._flow = self._task = None
        if not self._keep_alive:
            self._close()
        elif not self._full:
            self._ready_for_more()

    def _ready_for_more(self) -> None:
        """Nothing is being answered, and the client has room for answers."""
        self._wait_for_client(self._limits.header_s if self._arrived_s else self._limits.keep_alive_s)
        if self._waiting:
            self._loop.call_soon(self._next)
        elif not self._closing:
            self._transport.resume_reading()  # type: ignore[union-attr]

    def _next(self) -> None:
        if self._busy or self._closing or self._full or not self._waiting:
            return
        request, keep_alive = self._waiting.popleft()
        if not self._waiting:
            self._transport.resume_reading()  # type: ignore[union-attr]
        self._begin(request, keep_alive, modern=True)

    def _head(self, status: int, content_type: bytes, extra: Headers, framing: bytes) -> bytes:
        closing = b"" if self._keep_alive else b"connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\ndate: %b\r\ncontent-type: %b\r\n%b%b%b\r\n" % (
            status,
            REASONS.get(status, b"Unknown"),
            self._server.date,
            content_type,
            extra,
            closing,
            framing,
        )

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _wait_for_client(self, for_s: float) -> None:
        """While an answer is being made, only its writing has a deadline."""
        if not self._busy:
            self.deadline_s = self._now_s() + for_s

    def _check_header_size(self) -> None:
        """Bounds both what the parser has told us and what it still gathers; counting some of it twice is harmless
        because the limit is far above any sensible header."""
        if self._header_bytes > self._limits.header_bytes:
            self.refuse(431, f"request headers are larger than {self._limits.header_bytes} bytes")

    def _answer_expectation(self, expectation: bytes) -> None:
        if expectation.lower() != b"100-continue":
            self.refuse(417, "the only expectation this server meets is 100-continue")
        elif self._parser.get_http_version() == "1.1" and not self._busy:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refuse_large_body(self) -> None:
        self.refuse(413, f"the request body is larger than {self._limits.body_bytes} bytes")

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        self.deadline_s = self._now_s() + self._limits.send_s

    def _linger(self) -> None:
        """Close our side and discard what still arrives: closing at once would reset the connection, and the client
        could lose the answer that tells it what was wrong."""
        self._closing = True
        self.deadline_s = self._now_s() + LINGER_S
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._close()


class HttpServer:
    """All client connections of one process, and the sweep that enforces their deadlines."""

    def __init__(
        self,
        handler: Handler,
        refusal: Callable[[int, str], tuple[bytes, bytes]],
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        now_s: Callable[[], float],
        wall_clock_s: Callable[[], float],
        gate: Gate = lambda _target, _headers: None,
    ) -> None:
        """`refusal` makes the body and header lines of an answer from a status and a sentence."""
        self.gate = gate
        self.handler = handler
        self.refusal = refusal
        self.limits = limits
        self.loop = loop
        self.now_s = now_s
        self.date = b""
        self._wall_clock_s = wall_clock_s
        self._connections: set[ClientConnection] = set()
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._tick()

    def protocol(self) -> ClientConnection:
        return ClientConnection(self)

    def joined(self, connection: ClientConnection) -> bool:
        """Count a connection in; false if it is one too many."""
        self._connections.add(connection)
        self._empty.clear()
        return len(self._connections) <= self.limits.connections and not self._closing

    def left(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def finish(self) -> None:
        """Close idle connections now and the others after their current answer."""
        self._closing = True
        for connection in tuple(self._connections):
            connection.finish_and_close()

    def abort(self) -> None:
        """Drop every connection; what still runs for them is cancelled."""
        for connection in tuple(self._connections):
            connection.abort()

    async def closed(self) -> None:
        """Return once no connection is left."""
        await self._empty.wait()

    async def sweep(self, every_s: float = 1.0) -> None:
        """Enforce deadlines until cancelled. One sweep for all costs nothing per request, unlike a timer each."""
        while True:
            await asyncio.sleep(every_s)
            self._tick()
            now_s = self.now_s()
            for connection in [each for each in self._connections if each.deadline_s < now_s]:
                connection.expire()

    def _tick(self) -> None:
        self.date = formatdate(self._wall_clock_s(), usegmt=True).encode()
