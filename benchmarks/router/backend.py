"""The cheapest HTTP backend that every proxy takes for an engine: one process, several ports, answers from templates.

It speaks enough of OpenAI's API, of SGLang's own and of the microserving verbs to be routed to. Streams are paced by
one timer wheel for all of them. What to answer is in the prompt itself, see `wire`.

`python -m benchmarks.router.backend --ports 2` prints `{"ports": [...]}` once it listens, and serves until it is ended.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

import httptools
import msgspec
import uvloop

from benchmarks.router.sockets import prepare, receive
from benchmarks.router.wire import MARK, Order, read_order
from engines.protocol import TIMINGS_COMMENT, TIMINGS_HEADER, Tokens
from engines.types import EngineInfo, EngineLoad, EngineTimings, KvLayout

ClockNs = Callable[[], int]

SLOT_NS = 250_000
SLOTS = 512
BACKLOG = 2048
KV_TOKENS = 10_000_000
SMALL_BODY_BYTES = 2_000

TIMINGS = msgspec.json.encode(
    EngineTimings(prompt_tokens=16, cached_tokens=0, output_tokens=100, queue_s=0.0, prefill_s=0.001, decode_s=0.01)
)
USAGE = b'{"prompt_tokens":16,"completion_tokens":100,"total_tokens":116}'


class Template:
    """How one API words a chunk and a whole answer. Both take the fields of a mark; a chunk also its finish reason."""

    def __init__(self, head: bytes, piece: bytes, whole: bytes, usage: bytes) -> None:
        event = b"data: " + head + piece + b"}\n\n"
        self.event = _framed(event % (0, 0, 0, 0, FINISH[False]), event)
        self.answer = head + whole + b',"usage":' + USAGE + b"}"
        self.usage = b"data: " + head + usage + b',"usage":' + USAGE + b"}\n\n"


FINISH = {False: b"null  ", True: b'"stop"'}


def _framed(sample: bytes, template: bytes) -> bytes:
    """A chunk of chunked transfer around `template`, whose rendering is always as long as `sample`."""
    return b"%x\r\n" % len(sample) + template + b"\r\n"


TEMPLATES = {
    "completions": Template(
        b'{"id":"cmpl-bench","object":"text_completion","created":1700000000,"model":"bench","choices":',
        b'[{"index":0,"text":"' + MARK + b'","logprobs":null,"finish_reason":%b}]',
        b'[{"index":0,"text":"' + MARK + b'","logprobs":null,"finish_reason":"stop"}]',
        b"[]",
    ),
    "chat": Template(
        b'{"id":"chatcmpl-bench","created":1700000000,"model":"bench",',
        b'"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"'
        + MARK
        + b'"},"finish_reason":%b}]',
        b'"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"'
        + MARK
        + b'"},"finish_reason":"stop"}]',
        b'"object":"chat.completion.chunk","choices":[]',
    ),
    "generate": Template(
        b'{"meta_info":{"id":"bench","prompt_tokens":16,"completion_tokens":1},',
        b'"text":"' + MARK + b'","finish_reason":%b',
        b'"text":"' + MARK + b'"',
        b'"text":""',
    ),
}
APIS = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat", b"/generate": "generate"}
START_GENERATE = b"/microserving/start_generate"

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Wheel:
    """All running streams, by the slot of 250 µs in which their next chunk is due."""

    def __init__(self, clock_ns: ClockNs) -> None:
        self._clock_ns = clock_ns
        self._slots: list[list[Stream]] = [[] for _ in range(SLOTS)]
        self._at = clock_ns() // SLOT_NS

    def add(self, stream: "Stream") -> None:
        self._slots[(self._at + stream.gap_slots) % SLOTS].append(stream)

    def turn(self) -> None:
        """Let every stream whose slot has come send its chunk. Falling behind costs pace, never a chunk."""
        now = self._clock_ns() // SLOT_NS
        while self._at < now:
            self._at += 1
            index = self._at % SLOTS
            due, self._slots[index] = self._slots[index], []
            for stream in due:
                if stream.send_next():
                    self.add(stream)


class Stream:
    """One paced answer. Its first chunk, with the headers, comes one gap after the request."""

    __slots__ = ("_clock_ns", "_connection", "_event", "_order", "_sent", "_tail", "gap_slots")

    def __init__(self, connection: "Connection", event: bytes, tail: bytes, order: Order, clock_ns: ClockNs) -> None:
        self._connection = connection
        self._event = event
        self._tail = tail
        self._order = order
        self._clock_ns = clock_ns
        self._sent = 0
        # The wheel has a finite rim: longer gaps than it holds are cut to it.
        self.gap_slots = min(max(1, order.gap_us * 1000 // SLOT_NS), SLOTS - 1)

    def send_next(self) -> bool:
        """Send the next chunk; whether there are more to come."""
        order, number = self._order, self._sent
        last = number + 1 >= order.chunks
        now_ns = self._clock_ns()
        data = self._event % (number, now_ns, order.request, now_ns - self._connection.read_ns, FINISH[last])
        if number == 0:
            data = STREAM_HEAD + data
        self._sent += 1
        alive = self._connection.send(data + self._tail if last else data)
        return alive and not last


class Connection:
    """One proxy connection; requests on it come one after the other. It closes its socket when the proxy leaves."""

    def __init__(self, sock: socket.socket, wheel: Wheel, info: bytes, clock_ns: ClockNs) -> None:
        self._socket = sock
        self._wheel = wheel
        self._info = info
        self._clock_ns = clock_ns
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._unsent = b""
        self._open = True
        self.read_ns = 0
        """When the last byte of the current request had arrived."""
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _readable(self) -> None:
        try:
            data, self.read_ns = receive(self._socket)
            if not data:
                self.close()
                return
            self._parser.feed_data(data)
        except BlockingIOError:
            return
        except (OSError, httptools.HttpParserError):
            self.close()

    def on_url(self, url: bytes) -> None:
        self._path = url.partition(b"?")[0]
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        api = APIS.get(self._path)
        if api is not None:
            self._generate(TEMPLATES[api], microserving=False)
        elif self._path == START_GENERATE:
            chat = b'"api":"chat"' in self._body
            self._generate(TEMPLATES["chat" if chat else "completions"], microserving=True)
        else:
            self.send(_plain(self._small_answer()))

    def send(self, data: bytes) -> bool:
        """Send at once, so that a mark's time is the time of sending; False once the peer has left."""
        if not self._open:
            return False
        if self._unsent:
            self._unsent += data
            return True
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return False
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.add_writer(self._socket, self._writable)
        return True

    def _writable(self) -> None:
        data, self._unsent = self._unsent, b""
        self._loop.remove_writer(self._socket)
        self.send(data)

    def _generate(self, template: Template, microserving: bool) -> None:
        body, order = self._body, read_order(self._body)
        if b'"stream":true' in body or b'"stream": true' in body:
            tail = _stream_tail(template, microserving, b'"include_usage":true' in body)
            self._wheel.add(Stream(self, template.event, tail, order, self._clock_ns))
        else:
            mark = (0, self._clock_ns(), order.request, 0)
            self.send(_plain(template.answer % mark, TIMINGS_LINE if microserving else b""))

    def _small_answer(self) -> bytes:
        if self._path == b"/microserving/info":
            return self._info
        if self._path == b"/tokenize":
            return SMALL_TOKENS if len(self._body) < SMALL_BODY_BYTES else LARGE_TOKENS
        return SMALL_ANSWERS.get(self._path, b"{}")


TIMINGS_LINE = TIMINGS_HEADER.encode() + b": " + TIMINGS + b"\r\n"
SMALL_TOKENS = msgspec.json.encode(Tokens(tokens=list(range(16)), count=16))
LARGE_TOKENS = msgspec.json.encode(Tokens(tokens=list(range(3000)), count=3000))
_SERVER_INFO = (
    b'{"model_path":"bench","model_id":"bench","served_model_name":"bench","tp_size":1,"dp_size":1,"version":"0.5.0"}'
)
SMALL_ANSWERS = {
    b"/v1/models": b'{"object":"list","data":[{"id":"bench","object":"model","created":1700000000}]}',
    b"/get_model_info": b'{"model_path":"bench","tokenizer_path":"bench","is_generation":true}',
    b"/model_info": b'{"model_path":"bench","tokenizer_path":"bench","is_generation":true}',
    b"/get_server_info": _SERVER_INFO,
    b"/server_info": _SERVER_INFO,
    b"/get_load": b'[{"dp_rank":0,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":0}]',
    b"/microserving/load": msgspec.json.encode(EngineLoad(kv_capacity_tokens=KV_TOKENS)),
}


def _plain(body: bytes, more_headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        more_headers,
        len(body),
        body,
    )


def _stream_tail(template: Template, microserving: bool, usage: bool) -> bytes:
    """What ends a stream after its last chunk, framed, with the end of the chunked body."""
    events = template.usage if usage else b""
    if microserving:
        events += TIMINGS_COMMENT + TIMINGS + b"\n\n"
    events += b"data: [DONE]\n\n"
    return _framed(events, events) + b"0\r\n\r\n"


def engine_info(port: int) -> EngineInfo:
    layout = KvLayout(model="bench", dtype="bfloat16", layers=2, kv_heads=2, head_dim=64)
    return EngineInfo(
        engine_id=f"bench-{port}",
        url=f"http://127.0.0.1:{port}",
        kind="bench",
        model="bench",
        context_length_tokens=1_000_000,
        kv_capacity_tokens=KV_TOKENS,
        kv_layout=layout,
        transports=("tcp",),
        epoch="0",
    )


class Backend:
    """A listening loopback port. Close it in the loop that opened it."""

    def __init__(self, wheel: Wheel, clock_ns: ClockNs) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._info = msgspec.json.encode(engine_info(self.port))
        self._wheel = wheel
        self._clock_ns = clock_ns
        self._connections: list[Connection] = []
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            while True:
                accepted, _ = self._listener.accept()
                prepare(accepted)
                self._connections.append(Connection(accepted, self._wheel, self._info, self._clock_ns))


def start_timer(period_ns: int, call: Callable[[], None]) -> int:
    """Call `call` every `period_ns` from the running loop; the timer's file descriptor, for the caller to close.

    The loop's own timers have a resolution of 1 ms, which would send the chunks of many streams as bursts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    spec = (ctypes.c_long * 4)(0, period_ns, 0, period_ns)
    if fd < 0 or libc.timerfd_settime(fd, 0, spec, None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd")

    def expired() -> None:
        with suppress(BlockingIOError):
            os.read(fd, 8)
        call()

    asyncio.get_running_loop().add_reader(fd, expired)
    return fd


async def serve(ports: int) -> None:
    """Serve until cancelled."""
    wheel = Wheel(time.time_ns)
    with ExitStack() as stack:
        backends = [stack.enter_context(closing(Backend(wheel, time.time_ns))) for _ in range(ports)]
        stack.callback(os.close, start_timer(SLOT_NS, wheel.turn))
        print(json.dumps({"ports": [backend.port for backend in backends]}), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ports", type=int, default=1)
    # A collection would stop all streams at once and show up as latency of the proxy.
    gc.freeze()
    gc.disable()
    uvloop.run(serve(options.parse_args().ports))


if __name__ == "__main__":
    main()
