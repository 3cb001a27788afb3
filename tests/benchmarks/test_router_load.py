"""The load over loopback: what it counts, and that it notices gaps, repeats, mix-ups and refusals."""

import asyncio
import os
import time
from contextlib import closing

import pytest

from benchmarks.router.backend import SLOT_NS, Backend, Wheel, start_timer
from benchmarks.router.load import Times, asking, measure
from benchmarks.router.scenarios import Scenario, bodies, path_of
from benchmarks.router.wire import MARK

PLAIN = Scenario("plain", "", "small", 4)
STREAMS = Scenario("streams", "", "small", 4, stream=True, chunks=5, gap_us=2_000)
TIMES = Times(warm_up_s=0.05, window_s=0.3)


async def load(scenario, port, events=None):
    ask = asking(path_of(scenario, True), port, bodies(scenario, True, seed=1))
    return await measure(scenario, port, ask, TIMES, (events if events is not None else []).append)


@pytest.fixture
async def backend_port():
    wheel = Wheel(time.time_ns)
    timer = start_timer(SLOT_NS, wheel.turn)
    with closing(Backend(wheel, time.time_ns)) as backend:
        yield backend.port
    asyncio.get_running_loop().remove_reader(timer)
    os.close(timer)


@pytest.fixture
async def answering():
    """Serve fixed pieces of one answer to every request, by what `make` returns for its bytes; the port."""
    servers = []

    async def start(make):
        async def serve(reader, writer):
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                    for piece in make(await reader.readexactly(length)):
                        writer.write(piece)
                        await asyncio.sleep(0.001)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return servers[-1].sockets[0].getsockname()[1]

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


def request_of(body):
    return int(body[body.index(b"#") + 1 :][:6])


def stream(body, numbers, request=None, done=True):
    """A streamed answer in one piece with the given chunk numbers."""
    asked = request_of(body) if request is None else request
    text = b"".join(b"data: " + MARK % (number, time.time_ns(), asked, 0) + b"\n\n" for number in numbers)
    text += b"data: [DONE]\n\n" if done else b""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)


async def test_plain_requests_are_counted_without_errors(backend_port):
    events = []
    measured = await load(PLAIN, backend_port, events)
    assert measured.requests > 0
    assert measured.errors == {}
    assert measured.latency_ms is not None
    assert measured.added_chunk_us is None
    assert events == ["open", "closed"]


async def test_whole_streams_are_counted_chunk_by_chunk_without_errors(backend_port):
    measured = await load(STREAMS, backend_port)
    assert measured.chunks >= measured.requests > 0
    assert measured.errors == {}
    assert None not in (measured.added_ttft_ms, measured.added_chunk_us, measured.gap_ms)


async def test_latency_counts_from_the_backends_own_sending(backend_port):
    measured = await load(STREAMS, backend_port)
    # The backend holds the first chunk for a gap of 2 ms; the client waits for it, but nobody added it.
    assert measured.ttft_ms[0] > measured.added_ttft_ms[0]
    assert measured.added_ttft_ms[0] > 0
    assert measured.added_chunk_us[0] > 0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda body: [stream(body, [0, 1, 3, 4])], "gap in a stream"),
        (lambda body: [stream(body, [0, 1, 1, 2, 3, 4])], "repeat in a stream"),
        (lambda body: [stream(body, range(4))], "stream cut short"),
        (lambda body: [stream(body, range(5), done=False)], "stream without [DONE]"),
        (lambda body: [stream(body, range(5), request=999_999)], "chunk of another stream"),
        (lambda _: [b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"], "HTTP 503"),
    ],
)
async def test_what_is_wrong_with_a_stream_is_noticed(answering, make, error):
    measured = await load(STREAMS, await answering(make))
    assert measured.errors.get(error, 0) > 0


async def test_marks_cut_anywhere_by_the_network_are_put_together_again(answering):
    def in_small_pieces(body):
        whole = stream(body, range(5))
        return [whole[at : at + 7] for at in range(0, len(whole), 7)]

    measured = await load(STREAMS, await answering(in_small_pieces))
    assert measured.errors == {}
    assert measured.chunks > 0


async def test_an_answer_to_somebody_else_is_noticed(answering):
    text = MARK % (0, 0, 999_999, 0)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
    measured = await load(PLAIN, await answering(lambda _: [answer]))
    assert measured.errors.get("answer to another request", 0) > 0


async def test_lost_connections_are_counted_and_opened_again(answering):
    seen = []

    def first_dies(body):
        seen.append(body)
        if len(seen) == 1:
            raise ConnectionResetError
        return [stream(body, range(5))]

    measured = await load(STREAMS, await answering(first_dies))
    assert measured.errors == {"connection lost": 1}
    assert measured.chunks > 0


async def test_a_target_that_does_not_listen_is_an_error(free_port):
    with pytest.raises(OSError, match=r"\[Errno 111\]|refused"):
        await load(PLAIN, free_port())
