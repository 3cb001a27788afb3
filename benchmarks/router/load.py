"""Asks, over keep-alive connections, and measures what comes back. One process, one scenario, one target.

Prints one JSON object a line: `{"event": "open"}` when the measured window begins, `{"event": "closed"}` when it ends,
then the `Measured` of it as `{"event": "result", ...}`. Every stream is checked for gaps, repeats and strange chunks,
inside the window and outside of it.

How latency is defined, with the times that the backend puts into its marks (one machine, one clock; arrivals are those
at the socket, as the kernel notes them):
- added TTFT: (first chunk arrived − request sent) − (first chunk sent by the backend − request arrived there);
- added chunk: chunk arrived − chunk sent by the backend, for every chunk but the first.
"""

import argparse
import asyncio
import gc
import os
import socket
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httptools
import msgspec
import uvloop

from benchmarks.report import percentiles
from benchmarks.router.scenarios import SCENARIOS, BodyOf, Scenario, bodies, path_of
from benchmarks.router.sockets import prepare, receive
from benchmarks.router.wire import MARK_BYTES, MAX_REQUEST

ClockNs = Callable[[], int]
Ask = Callable[[int], bytes]
"""The bytes of the n-th request, head and body."""

PERCENTS = (50.0, 99.0)
RETRY_S = 0.05
CONNECT_S = 20.0
DONE = b"[DONE]"
DONE_TAIL_BYTES = 32


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients saw within the window. Latencies are `[p50, p99]`, `None` where there were none."""

    window_s: float
    requests: int
    chunks: int
    errors: dict[str, int]
    """Reason -> how often, over the whole run."""
    cpu_share: float
    """Of one core, used by the load itself."""
    latency_ms: list[float] | None
    ttft_ms: list[float] | None
    added_ttft_ms: list[float] | None
    added_chunk_us: list[float] | None
    gap_ms: list[float] | None


class Window:
    """Counts and latencies; counts only while open."""

    def __init__(self) -> None:
        self.is_open = False
        self.requests = 0
        self.chunks = 0
        self.errors: Counter[str] = Counter()
        self.latency_ns = array("q")
        self.ttft_ns = array("q")
        self.added_ttft_ns = array("q")
        self.added_chunk_ns = array("q")
        self.gap_ns = array("q")

    def measured(self, window_s: float, cpu_s: float) -> Measured:
        return Measured(
            window_s=window_s,
            requests=self.requests,
            chunks=self.chunks,
            errors=dict(self.errors),
            cpu_share=cpu_s / window_s,
            latency_ms=_scaled(self.latency_ns, 1e6),
            ttft_ms=_scaled(self.ttft_ns, 1e6),
            added_ttft_ms=_scaled(self.added_ttft_ns, 1e6),
            added_chunk_us=_scaled(self.added_chunk_ns, 1e3),
            gap_ms=_scaled(self.gap_ns, 1e6),
        )


def _scaled(values_ns: Sequence[int], by: float) -> list[float] | None:
    found = percentiles(values_ns, PERCENTS)
    return None if found is None else [value / by for value in found]


class Client:
    """One keep-alive connection in a closed loop: the next request goes out when an answer is complete."""

    def __init__(self, sock: socket.socket, number: int, ask: Ask, window: Window, clock_ns: ClockNs) -> None:
        self._socket = sock
        self._request = number
        self._ask = ask
        self.window = window
        self._clock_ns = clock_ns
        self._parser: Any = httptools.HttpResponseParser(self)
        self._asked = False
        self.now_ns = 0
        self.asked_ns = 0
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done once the connection is closed, whoever ended it."""
        self._loop.add_reader(sock, self._readable)

    def _readable(self) -> None:
        try:
            data, self.now_ns = receive(self._socket)
            if not data:
                raise ConnectionResetError
            self._parser.feed_data(data)
        except BlockingIOError:
            return
        except OSError:
            self._fail("connection lost")
        except httptools.HttpParserError as error:
            self._fail(f"bad HTTP: {error}")

    def ask_next(self) -> None:
        if self.gone.done():
            return
        self._request = (self._request + 1) % MAX_REQUEST
        self.begin(b"%06d" % self._request)
        data = self._ask(self._request)
        self._asked = True
        self.asked_ns = self._clock_ns()
        try:
            if self._socket.send(data) < len(data):
                self._fail("request not taken at once")
        except OSError:
            self._fail("connection lost")

    def _fail(self, reason: str) -> None:
        """A connection that closes between two requests is no error: a server may do that."""
        if self._asked:
            self.window.errors[reason] += 1
        self.leave()

    def leave(self) -> None:
        """Close at once; what is still under way does not count as an error."""
        self._asked = False
        if not self.gone.done():
            self.gone.set_result(None)
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def on_message_complete(self) -> None:
        self._asked = False
        status = self._parser.get_status_code()
        if status == 200:
            self.end()
            again = self.ask_next
        else:
            self.window.errors[f"HTTP {status}"] += 1
            again = self._ask_later
        if self._parser.should_keep_alive():
            again()
        else:
            self.leave()

    def _ask_later(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_S, self.ask_next)

    def begin(self, request: bytes) -> None:
        """A request (its number, six digits) is about to be written."""
        raise NotImplementedError

    def on_body(self, body: bytes) -> None:
        """Some of the answer's body has been read, at `now_ns`."""
        raise NotImplementedError

    def end(self) -> None:
        """An answer with status 200 is complete."""
        raise NotImplementedError


class PlainClient(Client):
    """Answers that come in one piece."""

    def begin(self, request: bytes) -> None:
        self._expected = request
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def end(self) -> None:
        window, at = self.window, self._body.find(b"@")
        # Token-id prompts carry no order; the backend then calls the request 0.
        if at < 0 or self._body[at + 28 : at + 34] not in (self._expected, b"000000"):
            window.errors["answer to another request"] += 1
        if window.is_open:
            window.requests += 1
            window.latency_ns.append(self.now_ns - self.asked_ns)


class StreamClient(Client):
    """Streams of a known number of chunks, each of which must come once and in order."""

    chunks = 1

    def begin(self, request: bytes) -> None:
        self._expected = request
        self._next = 0
        self._rest = b""
        self._tail = b""
        self._last_ns = 0

    def on_body(self, body: bytes) -> None:
        self._tail = (self._tail + body)[-DONE_TAIL_BYTES:]
        if self._rest:
            body, self._rest = self._rest + body, b""
        at = body.find(b"@")
        while at >= 0:
            if len(body) - at < MARK_BYTES:
                self._rest = body[at:]
                return
            self._on_chunk(body[at : at + MARK_BYTES])
            at = body.find(b"@", at + MARK_BYTES)

    def _on_chunk(self, mark: bytes) -> None:
        number, sent_ns = int(mark[1:6]), int(mark[7:27])
        if number != self._next or mark[28:34] != self._expected:
            self._strange_chunk(number, mark[28:34])
        self._next = number + 1
        window = self.window
        if window.is_open:
            window.chunks += 1
            if number:
                window.added_chunk_ns.append(self.now_ns - sent_ns)
                window.gap_ns.append(self.now_ns - self._last_ns)
            else:
                ttft_ns = self.now_ns - self.asked_ns
                window.ttft_ns.append(ttft_ns)
                window.added_ttft_ns.append(ttft_ns - int(mark[35:48]))
        self._last_ns = self.now_ns

    def _strange_chunk(self, number: int, request: bytes) -> None:
        if request != self._expected:
            self.window.errors["chunk of another stream"] += 1
        else:
            self.window.errors["gap in a stream" if number > self._next else "repeat in a stream"] += 1

    def end(self) -> None:
        if self._next != self.chunks:
            self.window.errors["stream cut short"] += 1
        elif DONE not in self._tail:
            self.window.errors["stream without [DONE]"] += 1
        if self.window.is_open:
            self.window.requests += 1
            self.window.latency_ns.append(self.now_ns - self.asked_ns)


def asking(path: str, port: int, body_of: BodyOf) -> Ask:
    """The whole HTTP request for a request number."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nuser-agent: benchmark\r\naccept: */*\r\n"
        "content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    ).encode()

    def ask(request: int) -> bytes:
        body = body_of(request)
        return head % len(body) + body

    return ask


class Crowd:
    """All clients of a run. Lost connections are opened again until `leave`."""

    def __init__(self, scenario: Scenario, port: int, ask: Ask, window: Window) -> None:
        self._scenario = scenario
        self._port = port
        self._ask = ask
        self._window = window
        self._clients: dict[int, Client] = {}
        self._here = True

    async def connect(self) -> None:
        """Open every connection; raises `OSError` if the target refuses."""
        for seat in range(self._scenario.connections):
            await self._open(seat)

    async def run(self, seat: int) -> None:
        """Keep one seat asking; the starts of streams are spread over the length of one."""
        await asyncio.sleep(self._scenario.stream_s * seat / self._scenario.connections)
        while self._here:
            client = self._clients[seat]
            client.ask_next()
            await client.gone
            if self._here:
                await asyncio.sleep(RETRY_S)
                await self._open(seat)

    def leave(self) -> None:
        self._here = False
        for client in self._clients.values():
            client.leave()

    async def _open(self, seat: int) -> None:
        sock = socket.socket()
        try:
            prepare(sock)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except BaseException:  # cancelled or failed before a client owns the socket
            sock.close()
            raise
        self._clients[seat] = self._client(seat, sock)

    def _client(self, seat: int, sock: socket.socket) -> Client:
        kind = StreamClient if self._scenario.stream else PlainClient
        first = seat * (MAX_REQUEST // self._scenario.connections)
        # Seats number their requests far apart, so that a chunk that strays to another client is recognised.
        client = kind(sock, first, self._ask, self._window, time.time_ns)
        if isinstance(client, StreamClient):
            client.chunks = self._scenario.chunks
        return client


async def measure(scenario: Scenario, port: int, ask: Ask, times: "Times", tell: Callable[[str], None]) -> Measured:
    """Run the scenario; `tell` is called with `open` and `closed` when the measured window begins and ends."""
    window = Window()
    crowd = Crowd(scenario, port, ask, window)
    try:
        async with asyncio.timeout(CONNECT_S):
            await crowd.connect()
        async with asyncio.TaskGroup() as seats:
            for seat in range(scenario.connections):
                seats.create_task(crowd.run(seat))
            await asyncio.sleep(scenario.stream_s + times.warm_up_s)
            measured = await _observe(window, times.window_s, tell)
            crowd.leave()
    finally:
        crowd.leave()
    return measured


async def _observe(window: Window, window_s: float, tell: Callable[[str], None]) -> Measured:
    tell("open")
    started_s, cpu_s, window.is_open = time.monotonic(), time.process_time(), True
    await asyncio.sleep(window_s)
    window.is_open = False
    took_s, used_s = time.monotonic() - started_s, time.process_time() - cpu_s
    tell("closed")
    return window.measured(took_s, used_s)


class Times(msgspec.Struct, frozen=True):
    warm_up_s: float
    window_s: float


def tell(event: str, **more: Any) -> None:
    print(msgspec.json.encode({"event": event, **more}).decode(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--no-ids", action="store_true", help="send token ids to /generate")
    parser.add_argument("--warm-up-s", type=float, default=0.3)
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scenario = SCENARIOS[options.scenario]
    body_of = bodies(scenario, not options.no_ids, options.seed)
    ask = asking(path_of(scenario, not options.no_ids), options.port, body_of)
    # Woken readers must not interrupt the backend between noting the time of a chunk and sending it.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # A collection would stop all clients at once and show up as latency of the proxy.
    gc.freeze()
    gc.disable()
    measured = uvloop.run(measure(scenario, options.port, ask, Times(options.warm_up_s, options.window_s), tell))
    tell("result", measured=measured)


if __name__ == "__main__":
    main()
