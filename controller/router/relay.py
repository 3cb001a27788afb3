"""An engine's answer on its way to the client.

Streams are passed on as the events arrive, in whole events, with no parsing, queue or coroutine per piece; what they
say is only read if the stream has to go on elsewhere. Plain answers are gathered first, so that they can be asked for
again if the engine dies before they are complete.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from controller.router.http import ClientConnection, Headers
from engines.client import answered_error
from engines.errors import EngineError, EngineUnreachable
from engines.http1 import Exchange
from engines.protocol import TIMINGS_COMMENT, TIMINGS_HEADER, ResumedChoice
from engines.records import Outcome
from engines.types import EngineTimings

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
FAILED_EVENTS = (b'data: {"error"', b'"finish_reason":"abort"', b'"finish_reason": "abort"')
"""How an engine that fails once its stream has begun says so. Text cannot forge them: its quotes are escaped."""
LAST_PIECES = 4
PIECES_PER_CHECK = 256
"""How often the size of what is kept is looked at; adding it up per piece would cost every stream."""
TIMINGS_KEY = TIMINGS_HEADER.encode()
_timings = msgspec.json.Decoder(EngineTimings)
log = structlog.get_logger()


def read_timings(raw: bytes) -> EngineTimings | None:
    """`None` for what is none: an answer is as good without."""
    try:
        return _timings.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("timings_not_understood", error=str(error))
        return None


class Refused(Exception):
    """The engine answered with an error status; `content` is its body, in OpenAI's shape."""

    def __init__(self, status: int, headers: Mapping[bytes, bytes], content: bytes) -> None:
        super().__init__(f"the engine answered {status}")
        self.status = status
        self.content = content
        self.error: EngineError = answered_error(status, headers, content)


class Delivery:
    """What one client got of one answer, over all the engines that worked on it. Times are monotonic seconds."""

    __slots__ = (
        "_dropped_events",
        "_kept",
        "_kept_bytes",
        "_resume_bytes",
        "ended",
        "error_code",
        "first_s",
        "last_s",
        "outcome",
        "status",
        "timings",
    )

    def __init__(self, resume_bytes: int) -> None:
        self._resume_bytes = resume_bytes
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._dropped_events = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.timings: EngineTimings | None = None
        self.ended = False
        """The client has the whole answer: nothing more may be written for it."""
        self.outcome = Outcome.OK
        self.status = 200
        self.error_code: str | None = None

    def passed_on(self, data: bytes, now_s: float) -> None:
        """Note that whole events went to the client."""
        self.last_s = now_s
        self._kept.append(data)
        if not len(self._kept) % PIECES_PER_CHECK:
            self._check_size()

    def resume(self) -> list[ResumedChoice] | None:
        """What the client has so far, by choice; `None` if it was too much to keep, or more than text."""
        return None if self._dropped_events else delivered_choices(b"".join(self._kept))

    @property
    def complete(self) -> bool:
        """Whether the client has the end of the stream; many hang up at that very moment, before the engine does."""
        return self.ended or (bool(self._kept) and self._kept[-1].endswith(DONE))

    def settle(self) -> None:
        """The stream has ended: see whether it says itself that the answer failed."""
        last = b"".join(self._kept[-LAST_PIECES:])
        if any(each in last for each in FAILED_EVENTS):
            self.outcome, self.error_code = Outcome.FAILED, "engine_failed"

    @property
    def output_tokens(self) -> int:
        """As the engine counted them; one per event (less the closing one) as long as it has not said."""
        return self.timings.output_tokens if self.timings is not None else max(0, self._events - 1)

    @property
    def _events(self) -> int:
        return self._dropped_events + sum(piece.count(EVENT_END) for piece in self._kept)

    def _check_size(self) -> None:
        self._kept_bytes += sum(map(len, self._kept[-PIECES_PER_CHECK:]))
        if self._kept_bytes > self._resume_bytes:
            self._drop()

    def _drop(self) -> None:
        """Too much to keep: from now on only the number of events is known."""
        last = self._kept.pop()
        self._dropped_events = self._events
        self._kept = [last]
        self._kept_bytes = 0


class StreamRelay:
    """Sink of one streamed `start_generate`. `done` ends with `None`, `Refused` or `EngineUnreachable`."""

    def __init__(
        self,
        client: ClientConnection,
        delivery: Delivery,
        done: asyncio.Future[None],
        now_s: Callable[[], float],
        on_first: Callable[[], None],
        headers: Headers = b"",
    ) -> None:
        self.done = done
        self.exchange: Exchange | None = None
        self._client = client
        self._delivery = delivery
        self._now_s = now_s
        self._on_first = on_first
        self._extra = headers
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._tail = b""
        self._begun = delivery.first_s is not None

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        self._headers = headers

    def on_body(self, data: bytes) -> None:
        if self._tail or self._status != 200 or not data.endswith(EVENT_END):
            data = self._whole_events(data)
        if not data.startswith(b"data: ") or data.count(EVENT_END) > 1:
            data = self._take_timings(data)
            if not data:
                return
        self._delivery.passed_on(data, self._now_s())
        if self._begun:
            self._client.write(data)
        else:
            self._begin(data)

    def on_end(self) -> None:
        if self.done.done():
            return
        if self._status != 200:
            self.done.set_exception(Refused(self._status, self._headers, self._tail))
        elif not self._begun:
            self.done.set_exception(EngineUnreachable("the engine ended its stream before the first event"))
        else:
            self.done.set_result(None)

    def on_lost(self, error: EngineUnreachable) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    # Flow: back-pressure from the client to the engine

    def follow(self) -> None:
        """Take over a stream that another engine began."""
        if self._begun:
            self._client.follow(self)

    def pause(self) -> None:
        if self.exchange is not None:
            self.exchange.pause()

    def resume(self) -> None:
        if self.exchange is not None:
            self.exchange.resume()

    def _whole_events(self, data: bytes) -> bytes:
        """Hold back what is not yet a whole event (or, of an error answer, everything)."""
        data = self._tail + data
        whole = data.rfind(EVENT_END) + len(EVENT_END) if self._status == 200 and EVENT_END in data else 0
        self._tail = data[whole:]
        return data[:whole]

    def _begin(self, first: bytes) -> None:
        self._begun = True
        self._delivery.first_s = self._delivery.last_s
        self._on_first()
        self._client.start(200, self._headers.get(b"content-type", b"text/event-stream"), first, self, self._extra)

    def _take_timings(self, data: bytes) -> bytes:
        """Cut the timings event, if it is there, out of whole events.

        It is only looked for at the beginning of an event. JSON cannot hold a raw newline, so text cannot forge one.
        """
        start = 0 if data.startswith(TIMINGS_COMMENT) else data.find(EVENT_END + TIMINGS_COMMENT) + len(EVENT_END)
        if start < len(EVENT_END) and not data.startswith(TIMINGS_COMMENT):
            return data
        end = data.index(EVENT_END, start) + len(EVENT_END)
        self._delivery.timings = read_timings(data[start + len(TIMINGS_COMMENT) : end])
        return data[:start] + data[end:]


class PlainRelay:
    """Sink of one plain `start_generate`: gathers the answer. `done` as for `StreamRelay`."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.content = b""
        self.content_type = b"application/json"
        self.timings: EngineTimings | None = None
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._parts: list[bytes] = []

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        self._headers = headers

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_end(self) -> None:
        if self.done.done():
            return
        self.content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if self._status != 200:
            self.done.set_exception(Refused(self._status, self._headers, self.content))
            return
        self.content_type = self._headers.get(b"content-type", self.content_type)
        if TIMINGS_KEY in self._headers:
            self.timings = read_timings(self._headers[TIMINGS_KEY])
        self.done.set_result(None)

    def on_lost(self, error: EngineUnreachable) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


_event = msgspec.json.Decoder(_Event)


TEXT_FIELDS = frozenset({"role", "content"})


def delivered_choices(stream: bytes) -> list[ResumedChoice] | None:
    """Read delivered events back: the text of each choice so far, and one token for each event that had some.

    `None` if a delta held more than text (a tool call, reasoning): no engine could go on in the middle of that.
    """
    text: dict[int, list[str]] = {}
    finished: dict[int, str] = {}
    for line in stream.split(EVENT_END):
        if not line.startswith(b"data: {"):
            continue
        for choice in _event.decode(line[len(b"data: ") :]).choices:
            delta = choice.delta or {}
            if any(delta[name] for name in delta.keys() - TEXT_FIELDS):
                return None
            piece = choice.text if choice.delta is None else delta.get("content")
            text.setdefault(choice.index, []).extend([piece] if piece else [])
            if choice.finish_reason is not None:
                finished[choice.index] = choice.finish_reason
    return [
        ResumedChoice(index=index, text="".join(pieces), tokens=len(pieces), finish_reason=finished.get(index))
        for index, pieces in sorted(text.items())
    ]
