"""The engine client against scripted servers on real sockets: what it does when engines misbehave."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engines import errors
from engines.client import EngineClient, Prompt, VerbTimeouts
from engines.protocol import Config, ResumedChoice, Tokenize
from engines.tracing import Trace

LOAD = b'{"running":3,"kv_capacity_tokens":100,"kv_used_tokens":40}'
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), b"x: 0")
    return head + await reader.readexactly(int(length.split(b": ")[1]))


@pytest.fixture
async def serve():
    """Start a server that runs the n-th script on its n-th connection (the last one from then on)."""
    servers: list[asyncio.Server] = []

    async def start(*scripts: Script) -> str:
        connections = iter(range(10**6))

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await scripts[min(next(connections), len(scripts) - 1)](reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # the client hung up: what these scripts are there to see
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


@pytest.fixture
async def connect(serve):
    clients: list[EngineClient] = []

    async def open_(*scripts: Script, **timeouts: float) -> EngineClient:
        clients.append(EngineClient(await serve(*scripts), VerbTimeouts(**timeouts)))
        return clients[-1]

    yield open_
    for client in clients:
        await client.aclose()


class Collect:
    """A sink that keeps everything and says when it is over."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.over: asyncio.Future[errors.EngineError | None] = asyncio.get_running_loop().create_future()

    def on_head(self, status, headers) -> None:
        self.status = status

    on_piece = staticmethod(lambda: None)

    def on_body(self, data: bytes) -> None:
        self.body += data
        self.on_piece()

    def on_end(self) -> None:
        self.over.set_result(None)

    def on_lost(self, error: errors.EngineUnreachable) -> None:
        self.over.set_result(error)


async def always_load(reader, writer) -> None:
    while True:
        await read_request(reader)
        writer.write(answer(LOAD))


async def test_connections_are_reused(connect):
    opened = []

    async def counted(reader, writer) -> None:
        opened.append(1)
        await always_load(reader, writer)

    client = await connect(counted)
    for _ in range(5):
        assert (await client.load()).kv_free_tokens == 60
    assert len(opened) == 1
    await asyncio.gather(*(client.load() for _ in range(4)))
    assert len(opened) == 4


async def test_a_connection_that_the_engine_closed_meanwhile_is_replaced_unnoticed(connect):
    async def once(reader, writer) -> None:
        await read_request(reader)
        writer.write(answer(LOAD))

    client = await connect(once)
    for _ in range(3):
        assert (await client.load()).running == 3


async def test_a_fresh_connection_that_breaks_is_an_error_and_not_tried_again(connect):
    seen = []

    async def hang_up(reader, writer) -> None:
        seen.append(await read_request(reader))

    client = await connect(hang_up)
    with pytest.raises(errors.EngineUnreachable):
        await client.load()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (answer(b'{"error":{"code":"no_kv_room","message":"full"}}', "429 X", "retry-after: 2"), errors.NoKvRoom),
        (answer(b'{"error":{"code":"reservation_gone","message":"x"}}', "410 X"), errors.ReservationGone),
        (answer(b'{"error":{"code":"kv_layout_mismatch","message":"x"}}', "409 X"), errors.LayoutMismatch),
        (answer(b'{"error":{"code":"unheard_of","message":"x"}}', "418 X"), errors.BadRequest),
        (answer(b"<html>", "500 X"), errors.EngineError),
        (answer(b'{"error":{"code":404,"message":"x"}}', "404 X"), errors.BadRequest),
    ],
)
async def test_error_answers_become_the_exceptions_they_stand_for(connect, said, expected):
    async def refuse(reader, writer) -> None:
        await read_request(reader)
        writer.write(said)

    client = await connect(refuse)
    with pytest.raises(expected) as raised:
        await client.prep_recv("r", Prompt.of([1, 2, 3]), 2, 1.0)
    assert type(raised.value) is expected
    assert raised.value.retry_after_s == (2.0 if expected is errors.NoKvRoom else None)


@pytest.mark.parametrize("said", [b"nonsense\r\n\r\n", answer(b"{}x"), answer(b'{"running":"three"}'), answer(b"[")])
async def test_an_answer_that_is_not_what_it_should_be_counts_as_no_answer(connect, said):
    async def babble(reader, writer) -> None:
        await read_request(reader)
        writer.write(said)
        await reader.read()

    client = await connect(babble)
    with pytest.raises(errors.EngineUnreachable):
        await client.load()


async def test_nobody_there_is_unreachable(free_port):
    client = EngineClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(errors.EngineUnreachable):
        await client.info()
    await client.aclose()


async def test_a_host_that_cannot_be_one_is_unreachable():
    client = EngineClient("http://a..b:1")
    with pytest.raises(errors.EngineUnreachable):
        await client.info()
    await client.aclose()


async def silent(reader, writer) -> None:
    await reader.read()


async def test_silence_is_a_timeout(connect):
    client = await connect(silent, verb_s=0.05)
    with pytest.raises(errors.EngineTimeout):
        await client.load()


async def test_cancelling_a_call_closes_its_connection(connect):
    closed = asyncio.Event()

    async def wait_for_the_end(reader, writer) -> None:
        await read_request(reader)
        await reader.read()
        closed.set()

    client = await connect(wait_for_the_end)
    call = asyncio.create_task(client.load())
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.wait_for(closed.wait(), 10)
    assert call.cancelled() or (await asyncio.gather(call, return_exceptions=True))


async def test_generation_splices_the_clients_body_as_it_came(connect):
    asked = asyncio.get_running_loop().create_future()

    async def echo(reader, writer) -> None:
        asked.set_result(await read_request(reader))
        writer.write(answer(b"ok"))

    client = await connect(echo)
    sink = Collect()
    client.start_generate(
        "r1",
        "chat",
        b'{ "odd" :  "spacing" }',
        sink,
        Prompt.of([7, 8]),
        begin=1,
        resume=[ResumedChoice(index=0, text="hi", tokens=1)],
        trace=Trace(b"00-abc-def-01", b"k=v"),
    )
    assert await sink.over is None
    head, _, body = (await asked).partition(b"\r\n\r\n")
    assert b"traceparent: 00-abc-def-01\r\ntracestate: k=v\r\n" in head + b"\r\n"
    assert body == (
        b'{"request_id":"r1","api":"chat","begin":1,"prompt":[7,8],'
        b'"resume":[{"index":0,"text":"hi","tokens":1,"finish_reason":null}],"body":{ "odd" :  "spacing" }}'
    )


async def test_a_stream_that_breaks_off_is_reported_after_what_arrived(connect):
    async def half(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")

    client = await connect(half)
    sink = Collect()
    client.start_generate("r1", "completions", b"{}", sink)
    assert isinstance(await sink.over, errors.EngineUnreachable)
    assert (sink.status, sink.body) == (200, b"abc")


async def test_a_stream_that_stalls_times_out_but_a_paused_one_does_not(connect):
    async def stall(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await reader.read()

    client = await connect(stall, idle_s=0.1)
    sink = Collect()
    exchange = client.start_generate("r1", "completions", b"{}", sink)
    while not sink.body:
        await asyncio.sleep(0.001)
    exchange.pause()
    await asyncio.sleep(0.3)
    assert not sink.over.done()
    exchange.resume()
    assert isinstance(await sink.over, errors.EngineTimeout)


async def test_a_connection_that_was_paused_by_the_last_piece_serves_the_next_request(connect):
    async def at_once(reader, writer) -> None:
        for _ in range(2):
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
            await writer.drain()

    client = await connect(at_once, first_byte_s=5)
    for _ in range(2):
        sink = Collect()
        exchange = client.start_generate("r1", "completions", b"{}", sink)
        sink.on_piece = exchange.pause
        assert await sink.over is None


async def test_an_exchange_that_is_paused_before_it_is_connected_takes_nothing_until_it_is_resumed(connect):
    async def at_once(reader, writer) -> None:
        await read_request(reader)
        writer.write(answer(b"ok"))
        await reader.read()

    client = await connect(at_once)
    sink = Collect()
    exchange = client.start_generate("r1", "completions", b"{}", sink)
    exchange.pause()
    await asyncio.sleep(0.1)
    assert sink.body == b""
    exchange.resume()
    assert await sink.over is None


async def test_whatever_is_under_way_fails_when_the_client_is_closed(connect):
    async def half(reader, writer) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await reader.read()

    client = await connect(half)
    sink = Collect()
    client.start_generate("r1", "completions", b"{}", sink)
    while not sink.body:
        await asyncio.sleep(0.001)
    asking = asyncio.create_task(client.load())
    await asyncio.sleep(0.05)
    await client.aclose()
    assert isinstance(await sink.over, errors.EngineUnreachable)
    with pytest.raises(errors.EngineUnreachable):
        await asking
    with pytest.raises(errors.EngineUnreachable):
        await client.load()


async def test_an_answer_whose_end_cannot_be_understood_is_lost_and_not_waited_for(connect):
    class Baffled(Collect):
        def on_end(self) -> None:
            raise ValueError("what the answer says must not get into a log")

    client = await connect(always_load)
    sink = Baffled()
    client.start_generate("r1", "completions", b"{}", sink)
    error = await sink.over
    assert isinstance(error, errors.EngineUnreachable)
    assert "must not" not in error.message


async def test_a_plain_answer_may_take_longer_than_a_streams_first_byte(connect):
    async def slow(reader, writer) -> None:
        await read_request(reader)
        await asyncio.sleep(0.3)
        writer.write(answer(b"ok"))
        await reader.read()

    client = await connect(slow, first_byte_s=0.1, answer_s=10)
    streamed, plain = Collect(), Collect()
    client.start_generate("r1", "completions", b"{}", streamed)
    client.start_generate("r2", "completions", b"{}", plain, stream=False)
    assert isinstance(await streamed.over, errors.EngineTimeout)
    assert await plain.over is None


async def test_after_abort_the_sink_hears_nothing_more(connect):
    client = await connect(always_load)
    sink = Collect()
    client.start_generate("r1", "completions", b"{}", sink).abort()
    await client.load()
    assert not sink.over.done()
    assert sink.status == 0


async def test_config_sends_only_what_is_to_change(connect):
    asked = asyncio.get_running_loop().create_future()

    async def echo(reader, writer) -> None:
        asked.set_result(await read_request(reader))
        writer.write(answer(b'{"chunked_prefill_tokens":64,"prefill_decode_interval":1}'))

    client = await connect(echo)
    in_force = await client.config(Config(chunked_prefill_tokens=64))
    assert in_force.prefill_decode_interval == 1
    assert (await asked).endswith(b'\r\n\r\n{"chunked_prefill_tokens":64}')


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", ""])
async def test_an_address_that_cannot_be_one_is_refused(url):
    with pytest.raises(ValueError, match="not an engine address"):
        EngineClient(url)


@pytest.mark.parametrize(
    "call",
    [
        lambda client, trace: client.prep_recv("r1", Prompt.of([7, 8]), 1, 9.0, trace),
        lambda client, trace: client.remote_send("r1", Prompt.of([7, 8]), "there", 0, 1, trace),
        lambda client, trace: client.abort("r1", trace),
        lambda client, trace: client.tokenize(Tokenize(prompt="hi"), trace),
    ],
    ids=["prep_recv", "remote_send", "abort", "tokenize"],
)
async def test_every_call_about_a_request_carries_its_trace(connect, call):
    asked = asyncio.get_running_loop().create_future()

    async def refuse(reader, writer) -> None:
        asked.set_result(await read_request(reader))
        writer.write(answer(b"{}", "503 Service Unavailable"))

    client = await connect(refuse)
    with pytest.raises(errors.EngineError):
        await call(client, Trace(b"00-abc-def-01", b"k=v"))
    assert b"traceparent: 00-abc-def-01\r\ntracestate: k=v\r\n" in await asked
