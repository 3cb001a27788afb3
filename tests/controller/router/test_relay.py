import asyncio

import pytest

from controller.router.relay import Delivery, PlainRelay, Refused, StreamRelay, delivered_choices
from engines.errors import EngineUnreachable
from engines.protocol import TIMINGS_HEADER
from engines.records import Outcome

TIMINGS = (
    b': trimtab {"prompt_tokens":3,"cached_tokens":1,"output_tokens":2,'
    b'"queue_s":0.1,"prefill_s":0.2,"decode_s":0.3}\n\n'
)


def event(text: str, index: int = 0, finish: str = "null") -> bytes:
    return f'data: {{"choices":[{{"index":{index},"text":"{text}","finish_reason":{finish}}}]}}\n\n'.encode()


class Client:
    """Stands in for the client's connection: what was written, in order."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def start(self, status, content_type, first, flow, extra=()) -> None:
        self.pieces.append(first)

    def follow(self, flow) -> None:
        self.flow = flow

    def write(self, data: bytes) -> None:
        self.pieces.append(data)


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def delivery() -> Delivery:
    return Delivery(resume_bytes=10_000)


@pytest.fixture
async def relay(client, delivery) -> StreamRelay:
    times = iter(range(1, 1000))
    done = asyncio.get_running_loop().create_future()
    return StreamRelay(client, delivery, done, lambda: float(next(times)), lambda: None)


async def test_whole_events_pass_unchanged_and_are_timed(relay, client, delivery):
    relay.on_head(200, {})
    for piece in (event("a"), event("b"), b"data: [DONE]\n\n"):
        relay.on_body(piece)
    relay.on_end()
    assert relay.done.result() is None
    assert client.pieces == [event("a"), event("b"), b"data: [DONE]\n\n"]
    assert (delivery.first_s, delivery.last_s, delivery.output_tokens) == (1.0, 3.0, 2)


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"error":{"message":"the queue is full","code":503}}\n\n',
        event("", finish='"abort"'),
    ],
)
async def test_a_stream_in_which_the_engine_says_that_it_failed_is_no_good_answer(relay, delivery, last):
    relay.on_head(200, {})
    for piece in (event("a"), last, b"data: [DONE]\n\n"):
        relay.on_body(piece)
    delivery.settle()
    assert delivery.outcome is Outcome.FAILED


async def test_text_cannot_pass_for_a_failure(relay, delivery):
    relay.on_head(200, {})
    for piece in (event('data: {\\"error\\": 1} \\"finish_reason\\":\\"abort\\"'), event("", finish='"stop"')):
        relay.on_body(piece)
    delivery.settle()
    assert delivery.outcome is Outcome.OK


async def test_timings_that_cannot_be_read_lose_no_answer(relay, client, delivery):
    relay.on_head(200, {})
    for piece in (event("a"), b': trimtab {"prompt_tokens":"many"}\n\n', b"data: [DONE]\n\n"):
        relay.on_body(piece)
    relay.on_end()
    assert relay.done.result() is None
    assert client.pieces == [event("a"), b"data: [DONE]\n\n"]
    assert delivery.timings is None


async def test_timings_that_cannot_be_read_lose_no_plain_answer():
    relay = PlainRelay(asyncio.get_running_loop().create_future())
    relay.on_head(200, {TIMINGS_HEADER.encode(): b"\xff"})
    relay.on_body(b"{}")
    relay.on_end()
    assert relay.done.result() is None
    assert (relay.content, relay.timings) == (b"{}", None)


async def test_a_stream_that_goes_on_elsewhere_is_held_back_by_a_slow_client_too(relay, client, delivery):
    relay.on_head(200, {})
    relay.on_body(event("a"))
    following = StreamRelay(client, delivery, asyncio.get_running_loop().create_future(), lambda: 5.0, lambda: None)
    relay.follow()
    following.follow()
    assert client.flow is following


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
async def test_events_cut_anywhere_leave_only_whole(relay, client, delivery, size):
    stream = event("a") + event("b") + TIMINGS + b"data: [DONE]\n\n"
    relay.on_head(200, {})
    for start in range(0, len(stream), size):
        relay.on_body(stream[start : start + size])
    relay.on_end()
    assert b"".join(client.pieces) == stream.replace(TIMINGS, b"")
    assert all(piece.endswith(b"\n\n") for piece in client.pieces)
    assert delivery.timings is not None
    assert delivery.timings.cached_tokens == 1


async def test_text_cannot_forge_timings(relay, client, delivery):
    forged = event("\\n\\n: trimtab {}\\n\\n")
    relay.on_head(200, {})
    relay.on_body(forged)
    assert client.pieces == [forged]
    assert delivery.timings is None


async def test_half_an_event_is_not_passed_on_when_the_engine_dies(relay, client):
    relay.on_head(200, {})
    relay.on_body(event("a") + event("b")[:20])
    relay.on_lost(EngineUnreachable("gone"))
    assert client.pieces == [event("a")]
    assert isinstance(relay.done.exception(), EngineUnreachable)


async def test_an_error_answer_is_refused_whole(relay, client):
    relay.on_head(400, {})
    relay.on_body(b'{"error":{"mess')
    relay.on_body(b'age":"no"}}\n\n')
    relay.on_end()
    refused = relay.done.exception()
    assert isinstance(refused, Refused)
    assert refused.content == b'{"error":{"message":"no"}}\n\n'
    assert client.pieces == []


async def test_a_stream_that_ends_before_its_first_event_is_a_failure(relay):
    relay.on_head(200, {})
    relay.on_end()
    assert isinstance(relay.done.exception(), EngineUnreachable)


def test_delivered_text_is_read_back_by_choice():
    stream = event("a") + event("x", 1) + event("b", finish='"stop"') + b'data: {"choices":[],"usage":{}}\n\n'
    first, second = delivered_choices(stream + b"data: [DONE]\n\n")
    assert (first.text, first.tokens, first.finish_reason) == ("ab", 2, "stop")
    assert (second.index, second.text, second.tokens, second.finish_reason) == (1, "x", 1, None)


def test_a_chats_role_is_no_token():
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    word = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    (choice,) = delivered_choices(role + word)
    assert (choice.text, choice.tokens) == ("hi", 1)


@pytest.mark.parametrize("more", ['"tool_calls":[{"index":0}]', '"reasoning_content":"hm"'])
def test_what_is_more_than_text_cannot_be_resumed(more):
    assert delivered_choices(f'data: {{"choices":[{{"index":0,"delta":{{{more}}}}}]}}\n\n'.encode()) is None


def test_a_stream_is_complete_once_the_client_has_its_end():
    delivery = Delivery(resume_bytes=10)
    for _ in range(600):
        delivery.passed_on(event("a"), 0.0)
        assert not delivery.complete
    delivery.passed_on(event("b") + b"data: [DONE]\n\n", 0.0)
    assert delivery.complete


def test_a_stream_too_long_to_keep_cannot_be_resumed():
    delivery = Delivery(resume_bytes=1000)
    for _ in range(600):
        delivery.passed_on(event("a"), 0.0)
    assert delivery.resume() is None
    assert delivery.output_tokens == 599
    assert len(delivery._kept) < 256
