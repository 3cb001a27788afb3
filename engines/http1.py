"""A small HTTP/1.1 client for the data path: pooled keep-alive connections, answers handed on piece by piece.

Answers go to a `Sink`, called from the event loop with whatever bytes have arrived: no coroutine, queue or copy per
piece. Everything that waits (connecting, a first byte that never comes) has a time-out.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import httptools

from engines.errors import EngineTimeout, EngineUnreachable

SWEEP_S = 0.05
"""How late a time-out may fire."""
NEVER = float("inf")
CLOSED = "the connections to this engine were closed"


class Sink(Protocol):
    """Where an answer goes. Called in order `on_head`, `on_body`*, then exactly one of `on_end` and `on_lost`.

    After `abort` only an `on_body` may still come, for what had already arrived.
    """

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Header names are lower case; of repeated ones the last counts."""
        ...

    def on_body(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, error: EngineUnreachable) -> None:
        """The answer will not be completed: connection lost, broken HTTP or time-out. Not called after `abort`."""
        ...


def _ignore(_: bytes) -> None:
    """Where the pieces of no exchange go."""


class Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time."""

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._loop = pool.loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self.on_body: Callable[[bytes], None] = _ignore
        self._headers: dict[bytes, bytes] = {}
        self._idle_s = 0.0
        self._deadline_s = 0.0
        self._fresh = False
        self._paused = False
        self.reused = False
        self.heard = False
        self.closed = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._fresh = True
        if self._sink is None or self._parser is None:
            self.close()  # an engine that speaks unasked cannot be trusted with the next request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            what = type(error.__context__).__name__  # its message may quote the answer
            self.fail(EngineUnreachable(f"the engine's answer cannot be understood: {what}"))
        except httptools.HttpParserError as error:
            self.fail(EngineUnreachable(f"the engine's answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._pool.dropped(self)
        self.fail(EngineUnreachable(f"the engine closed the connection: {exc or 'end of stream'}"))

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._sink is not None and self._parser is not None:
            self._sink.on_head(self._parser.get_status_code(), self._headers)

    def on_message_complete(self) -> None:
        sink, parser = self._sink, self._parser
        if sink is None or parser is None or parser.get_status_code() < 200:
            return
        sink.on_end()  # if it raises, the exchange has failed after all
        self._sink = None
        self._pool.over(self)
        self.resume()  # a slow client may have paused it with the very piece that ended the answer
        if parser.should_keep_alive():
            self._pool.give_back(self)
        else:
            self.close()

    # for the pool's users

    def send(self, request: bytes, sink: Sink, first_byte_s: float, idle_s: float) -> None:
        """Start an exchange. `first_byte_s` bounds the wait for the answer, `idle_s` each pause within it."""
        if self._transport is None or self.closed:
            raise EngineUnreachable("the connection is closed")
        self._sink = sink
        # A parser takes its callbacks when it is made: one per exchange hands pieces straight to the sink.
        self.on_body = sink.on_body
        self._parser = httptools.HttpResponseParser(self)
        self.heard = False
        self._idle_s = idle_s
        self._fresh = False
        self._deadline_s = self._loop.time() + first_byte_s
        self._pool.begun(self)
        self._transport.write(request)

    def pause(self) -> None:
        """Stop reading: whoever the answer is for is slower than the engine. The idle time-out stops too."""
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()
            self._paused = True
            self._deadline_s = NEVER

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self.closed:
            self._transport.resume_reading()
            self._paused = False
            self._deadline_s = self._loop.time() + self._idle_s

    def close(self) -> None:
        """Drop the connection and whatever runs on it, without telling the sink."""
        self._sink = None
        self.closed = True
        self._pool.over(self)
        if self._transport is not None:
            self._transport.abort()

    def check_deadline(self, now_s: float) -> None:
        """Fail the exchange if nothing came for too long. That something came is only noted here, not per piece."""
        if self._fresh:
            self._fresh = False
            if self._deadline_s != NEVER:
                self._deadline_s = now_s + self._idle_s
        elif self._deadline_s < now_s:
            self.fail(EngineTimeout("the engine sent nothing for too long"))

    def fail(self, error: EngineUnreachable) -> None:
        sink = self._sink
        self.close()
        if sink is not None:
            sink.on_lost(error)


class Pool:
    """Connections to one host and port. Opens as many as are in use at a time, keeps up to `max_idle` for reuse."""

    def __init__(self, host: str, port: int, connect_s: float = 2.0, max_idle: int = 256) -> None:
        self.host = host
        self.port = port
        self.loop = asyncio.get_running_loop()
        self._connect_s = connect_s
        self._max_idle = max_idle
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._emptied = asyncio.Event()
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def idle(self) -> Connection | None:
        """The most recently used idle connection, if there is one; the caller owns it until its exchange ends."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                connection.reused = True
                return connection
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises `EngineUnreachable`: an engine that cannot be reached in time has begun nothing."""
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self.loop.create_connection(lambda: Connection(self), self.host, self.port)
        except TimeoutError as error:
            raise EngineUnreachable(f"no connection to {self.host}:{self.port} within {self._connect_s} s") from error
        except (OSError, UnicodeError) as error:  # the latter for a host name that cannot be one
            raise EngineUnreachable(f"cannot connect to {self.host}:{self.port}: {error}") from error
        self._open.add(connection)
        if self._closed:
            connection.close()
            raise EngineUnreachable(CLOSED)
        return connection

    def begun(self, connection: Connection) -> None:
        """Watch the deadline of an exchange. One sweep for all of them is cheaper than a timer each."""
        self._busy.add(connection)
        if self._sweep is None:
            self._sweep = self.loop.call_later(SWEEP_S, self._enforce_deadlines)

    def over(self, connection: Connection) -> None:
        self._busy.discard(connection)

    def _enforce_deadlines(self) -> None:
        now_s = self.loop.time()
        for connection in tuple(self._busy):
            connection.check_deadline(now_s)
        self._sweep = self.loop.call_later(SWEEP_S, self._enforce_deadlines) if self._busy else None

    def give_back(self, connection: Connection) -> None:
        if len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def dropped(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._emptied.set()

    async def aclose(self) -> None:
        """Close every connection; what is under way fails, so that nobody waits for it. Returns once all are gone."""
        self._closed = True
        self._emptied.clear()
        for connection in tuple(self._open):
            connection.fail(EngineUnreachable(CLOSED))
        if self._open:
            await self._emptied.wait()
        if self._sweep is not None:
            self._sweep.cancel()


class Exchange:
    """One request on its way: starts on an idle connection if there is one, and is retried once on a fresh one
    if that connection turns out to have been closed by the engine meanwhile."""

    def __init__(self, pool: Pool, request: bytes, sink: Sink, first_byte_s: float, idle_s: float) -> None:
        self._pool = pool
        self._request = request
        self._sink = sink
        self.on_head = sink.on_head
        self.on_body = sink.on_body
        self._first_byte_s = first_byte_s
        self._idle_s = idle_s
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._aborted = False
        self._paused = False

    def start(self) -> "Exchange":
        connection = self._pool.idle()
        if connection is None:
            self._connecting = self._pool.loop.create_task(self._connect())
        else:
            self._begin(connection)
        return self

    def pause(self) -> None:
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """Stop at once; the sink hears nothing more. The engine sees its connection close."""
        self._aborted = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    # The rest of Sink, between the connection and the caller's sink

    def on_end(self) -> None:
        self._connection = None
        self._sink.on_end()

    def on_lost(self, error: EngineUnreachable) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.reused and not connection.heard and type(error) is EngineUnreachable:
            self._connecting = self._pool.loop.create_task(self._connect())
        else:
            self._sink.on_lost(error)

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect()
        except EngineUnreachable as error:
            if not self._aborted:
                self._sink.on_lost(error)
            return
        if self._aborted:
            connection.close()
        else:
            self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        self._connection = connection
        connection.send(self._request, self, self._first_byte_s, self._idle_s)
        if self._paused:
            connection.pause()
