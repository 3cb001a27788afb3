"""Calls from the HTTP process to the scheduler process, each with its own answer, any number at a time."""

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

import structlog

from engines.errors import EngineError, EngineTimeout
from engines.sglang.messages import Answer, AnyCall, Event, Failed, decode_report, encode

log = structlog.get_logger(__name__)
Kind = TypeVar("Kind", bound=Answer)
OnEvent = Callable[[Event], None]


class Bridge:
    """Belongs to one event loop. Raises `engines.errors`."""

    def __init__(self, send: Callable[[bytes], None], on_event: OnEvent) -> None:
        self._send = send
        self._on_event = on_event
        self._serial = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def new_id(self) -> int:
        """A `call_id` for the next call."""
        return next(self._serial)

    async def ask(self, call: AnyCall, kind: type[Kind], timeout_s: float | None = None) -> Kind:
        """The scheduler's answer, which comes between two of its passes. Raises what it refused the call for."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[call.call_id] = answered
        try:
            self._send(encode(call))
            async with asyncio.timeout(timeout_s):
                answer = await answered
        except TimeoutError as error:
            raise EngineTimeout(f"the scheduler was busy for {timeout_s:g} s") from error
        finally:
            self._waiting.pop(call.call_id, None)
        if isinstance(answer, Failed):
            raise answer.error()
        if not isinstance(answer, kind):
            raise EngineError(f"the scheduler answered with {type(answer).__name__} instead of {kind.__name__}")
        return answer

    def tell(self, call: AnyCall) -> None:
        """A call whose answer nobody waits for; it arrives in order with the others."""
        self._send(encode(call))

    def on_report(self, payload: bytes) -> None:
        report = decode_report(payload)
        if isinstance(report, Event):
            self._on_event(report)
            return
        waiting = self._waiting.get(report.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(report)
