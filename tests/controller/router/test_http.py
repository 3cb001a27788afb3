"""HTTP/1.1 as seen on the wire: raw sockets against the router's server, with a handler that echoes."""

import asyncio
import time

import pytest

from controller.router.http import ClientConnection, HttpServer, Request
from controller.settings import Limits

LARGE_BYTES = 1_000_000
GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


def post(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n%b\r\n%b" % (len(body), lines, body)


class Echo:
    """Answers with method, target and body; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.clients: list[ClientConnection] = []

    def __call__(self, request: Request, client: ClientConnection) -> asyncio.Task[None] | None:
        self.asked.append(request)
        self.clients.append(client)
        if request.path == b"/slow":
            return asyncio.get_running_loop().create_task(self._later(client))
        if request.path == b"/stream":
            client.start(200, b"text/plain", b"one", flow=self)
            client.write(b"two")
            client.end()
        elif request.path == b"/large":
            client.respond(200, b"x" * LARGE_BYTES)
        elif request.path == b"/flood":
            client.start(200, b"text/plain", b"x", flow=self)
        else:
            client.respond(200, b"%b %b %b" % (request.method, request.target, request.body), b"text/plain")
        return None

    async def _later(self, client: ClientConnection) -> None:
        await asyncio.sleep(0.05)
        client.respond(200, b"late")

    paused = 0
    resumed = 0

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.resumed += 1


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def limits() -> Limits:
    return Limits(header_bytes=2048, body_bytes=4096, header_s=30, body_s=30, connections=3)


def refusal(status: int, sentence: str) -> tuple[bytes, bytes]:
    return f"{status} {sentence}".encode(), b"x-refused: yes\r\n"


def gate(target: bytes, _headers) -> tuple[int, str] | None:
    return (401, "closed") if target.startswith(b"/secret") else None


@pytest.fixture
async def server(echo: Echo, limits: Limits):
    loop = asyncio.get_running_loop()
    http = HttpServer(echo, refusal, limits, loop, time.monotonic, time.time, gate)
    listening = await loop.create_server(http.protocol, "127.0.0.1", 0)
    sweeping = loop.create_task(http.sweep(0.02))
    http.port = listening.sockets[0].getsockname()[1]
    yield http
    sweeping.cancel()
    listening.close()
    http.abort()
    await http.closed()


class Raw:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), 10)

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), 10)


@pytest.fixture
async def connect(server: HttpServer):
    opened: list[asyncio.StreamWriter] = []

    async def open_(data: bytes = b"") -> Raw:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        opened.append(writer)
        writer.write(data)
        return Raw(reader, writer)

    yield open_
    for writer in opened:
        writer.close()


async def test_a_request_is_answered_and_the_connection_kept(connect):
    raw = await connect(GET)
    answer = await raw.until(b"GET /x ")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    raw.writer.write(GET)
    assert b"connection: close" not in await raw.until(b"GET /x ")


async def test_connection_close_is_obeyed(connect):
    raw = await connect(b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert b"connection: close\r\n" in await raw.rest()


async def test_pipelined_requests_are_answered_in_order(connect):
    slow = GET.replace(b"/x", b"/slow")
    raw = await connect(slow + GET.replace(b"/x", b"/2") + GET.replace(b"/x", b"/3"))
    answers = await raw.until(b"GET /3 ")
    assert answers.index(b"late") < answers.index(b"/2") < answers.index(b"/3")


async def test_a_request_may_arrive_byte_by_byte(connect):
    raw = await connect()
    for byte in post(b"hello"):
        raw.writer.write(bytes([byte]))
        await raw.writer.drain()
    await raw.until(b"POST /x hello")


async def test_chunked_bodies_are_put_together(connect):
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = await connect(head + b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\ntrailer: x\r\n\r\n")
    await raw.until(b"POST /x hello")


async def test_streams_are_chunked_for_http_1_1_and_end_with_the_connection_for_1_0(connect):
    raw = await connect(GET.replace(b"/x", b"/stream"))
    assert (await raw.until(b"0\r\n\r\n")).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    old = await connect(b"GET /stream HTTP/1.0\r\n\r\n")
    answer = await old.rest()
    assert answer.endswith(b"\r\n\r\nonetwo")
    assert b"transfer-encoding" not in answer


async def test_expect_100_continue_is_answered_before_the_body(connect):
    raw = await connect(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")
    assert await raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.writer.write(b"hello")
    await raw.until(b"POST /x hello")


async def test_head_has_no_body(connect):
    raw = await connect(GET.replace(b"GET", b"HEAD") + GET)
    answers = await raw.until(b"GET /x ")
    assert answers.count(b"HTTP/1.1 200") == 2
    assert b"HEAD /x" not in answers


REFUSED = {
    "not HTTP": (b"hello\r\n\r\n", b"400"),
    "no version": (b"GET /x\r\n\r\n", b"400"),
    "no host": (b"GET /x HTTP/1.1\r\n\r\n", b"400"),
    "both length and chunked": (
        b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /evil",
        b"400",
    ),
    "chunked and length": (
        b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\nGET /evil",
        b"400",
    ),
    "two lengths": (b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde", b"400"),
    "a length that is no number": (b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\nabcde", b"400"),
    "a negative length": (b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\nabcde", b"400"),
    "chunked twice": (
        b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"400",
    ),
    "an encoding after chunked": (
        b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"400",
    ),
    "an unknown encoding": (b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\nabc", b"400"),
    "a chunk size that is no number": (
        b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"400",
    ),
    "a space before the colon": (b"GET /x HTTP/1.1\r\nhost : a\r\n\r\n", b"400"),
    "a folded header": (b"GET /x HTTP/1.1\r\nhost: a\r\nx: b\r\n c\r\n\r\n", b"400"),
    "a bare line feed in a header": (b"GET /x HTTP/1.1\r\nhost: a\r\nx: b\rc: d\r\n\r\n", b"400"),
    "a NUL in a header": (b"GET /x HTTP/1.1\r\nhost: a\r\nx: b\0c\r\n\r\n", b"400"),
    "headers too large": (b"GET /x HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 4096, b"431"),
    "too many headers": (b"GET /x HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 600 + b"\r\n", b"431"),
    "a target too large": (b"GET /" + b"y" * 4096, b"431"),
    "a body declared too large": (b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4097\r\n\r\n", b"413"),
    "an unknown expectation": (b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: tea\r\ncontent-length: 1\r\n\r\na", b"417"),
    "an upgrade": (b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"400"),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
}


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_is_not_sound_http_is_refused_and_never_reaches_the_handler(connect, echo, data, status):
    raw = await connect(data)
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close\r\n" in answer
    assert echo.asked == []


async def test_a_chunked_body_that_grows_too_large_is_refused(connect, echo):
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = await connect(head + b"1000\r\n" + b"x" * 4096 + b"\r\n1\r\nx\r\n0\r\n\r\n")
    assert (await raw.rest()).startswith(b"HTTP/1.1 413")
    assert echo.asked == []


async def test_whoever_is_told_that_a_body_is_too_large_can_read_it_while_still_sending(connect):
    raw = await connect(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
    raw.writer.write(b"x" * 100_000)
    assert (await raw.rest()).startswith(b"HTTP/1.1 413")


async def test_the_gate_refuses_before_any_body_is_taken(connect, echo):
    raw = await connect(b"POST /secret HTTP/1.1\r\nhost: a\r\ncontent-length: 4000\r\n\r\n")
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"x-refused: yes\r\n" in answer
    assert echo.asked == []


async def test_trailers_are_no_headers(connect, echo):
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = await connect(head + b"1\r\na\r\n0\r\nauthorization: forged\r\n\r\n")
    await raw.until(b"POST /x a")
    assert b"authorization" not in echo.asked[0].headers


async def test_endless_trailers_are_refused(connect, echo):
    head = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = await connect(head + b"1\r\na\r\n0\r\n" + b"x: y\r\n" * 1000)
    assert (await raw.rest()).startswith(b"HTTP/1.1 431")
    assert echo.asked == []


async def test_nonsense_behind_a_request_does_not_spoil_its_answer(connect, echo):
    raw = await connect(GET.replace(b"/x", b"/slow") + b"nonsense\r\n\r\n")
    answer = await raw.rest()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"late")


async def test_nonsense_after_a_good_request_closes_without_a_second_answer(connect, echo):
    raw = await connect(GET + b"nonsense\r\n\r\n")
    answer = await raw.rest()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert len(echo.asked) == 1


@pytest.mark.parametrize("data", [b"GET /x HT", b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhalf"])
@pytest.mark.parametrize("limits", [Limits(header_s=0.05, body_s=0.05)])
async def test_half_a_request_times_out_with_408(connect, limits, data):
    raw = await connect(data)
    assert (await raw.rest()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("limits", [Limits(header_s=0.05, keep_alive_s=0.05)])
@pytest.mark.parametrize("data", [b"", GET])
async def test_an_idle_connection_is_closed_quietly(connect, limits, data):
    raw = await connect(data)
    answer = await raw.rest()
    assert answer.count(b"HTTP/1.1 ") == (1 if data else 0)


@pytest.mark.parametrize("limits", [Limits(header_s=0.05)])
async def test_a_slow_answer_is_no_idle_client(connect, limits, echo):
    raw = await connect(GET.replace(b"/x", b"/slow") + b"GET /hal")
    await raw.until(b"late")


@pytest.mark.parametrize("limits", [Limits(send_s=0.05)])
async def test_a_client_that_reads_nothing_is_paused_and_then_dropped(connect, limits, echo, server):
    raw = await connect(GET.replace(b"/x", b"/flood"))
    await raw.until(b"x")
    for _ in range(400):
        echo.clients[0].write(b"y" * 65536)
    assert echo.paused == 1
    async with asyncio.timeout(10):
        await server.closed()


async def test_a_client_that_reads_nothing_cannot_pile_up_answers(connect, echo, server):
    raw = await connect(GET.replace(b"/x", b"/large") * 500)
    await asyncio.sleep(0.3)
    assert len(echo.asked) < 100
    assert echo.clients[0]._transport.get_write_buffer_size() < 3 * LARGE_BYTES
    answers = 0
    async with asyncio.timeout(30):
        while answers < 500:
            answers += (await raw.reader.readexactly(LARGE_BYTES)).count(b"HTTP/1.1 200")
            if len(echo.asked) == 500 and answers >= 490:
                break


@pytest.mark.parametrize("limits", [Limits(keep_alive_s=0.2, send_s=30)])
async def test_a_slow_reader_that_goes_idle_is_closed_like_any_other(connect, limits, echo, server):
    raw = await connect(GET.replace(b"/x", b"/large") * 100)
    await asyncio.sleep(0.1)
    assert echo.clients[0]._full
    await raw.rest()
    async with asyncio.timeout(10):
        await server.closed()


async def test_a_client_that_catches_up_resumes_the_flow(connect, echo):
    raw = await connect(GET.replace(b"/x", b"/flood"))
    await raw.until(b"x")
    for _ in range(3):
        for _ in range(200):
            echo.clients[0].write(b"y" * 65536)
        await asyncio.wait_for(raw.reader.readexactly(200 * 65536), 10)
    assert echo.paused == 3
    async with asyncio.timeout(10):
        while echo.resumed < 3:
            await raw.reader.read(65536)


async def test_a_client_that_leaves_cancels_its_request(connect, echo, server):
    raw = await connect(GET.replace(b"/x", b"/slow"))
    while not echo.asked:
        await asyncio.sleep(0.001)
    task = echo.clients[0]._task
    raw.writer.close()
    async with asyncio.timeout(10):
        await server.closed()
        await asyncio.wait([task])
    assert task.cancelled()


async def test_connections_beyond_the_limit_are_refused(connect):
    kept = [await connect(GET) for _ in range(3)]
    for raw in kept:
        await raw.until(b"GET /x ")
    extra = await connect()
    assert (await extra.rest()).startswith(b"HTTP/1.1 503")


async def test_finishing_closes_idle_connections_and_lets_answers_complete(connect, server):
    idle = await connect(GET)
    await idle.until(b"GET /x ")
    busy = await connect(GET.replace(b"/x", b"/slow"))
    await asyncio.sleep(0.02)
    server.finish()
    assert await idle.rest() == b""
    answer = await busy.rest()
    assert answer.endswith(b"late")
    assert b"connection: close" in answer
