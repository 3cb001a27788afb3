"""`remote_send` in the HTTP process: check, introduce, compute, and wait until the receiver holds the KV."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from engines.abortable import Abortable
from engines.errors import BadRequest, EngineError, ReservationGone, TransferFailed
from engines.protocol import RemoteSend, RemoteSendAnswer
from engines.sglang.bridge import Bridge
from engines.sglang.messages import AllWritten, Send, SendReport, Sent, StopSend, pack_tokens
from engines.sglang.peers import Peers
from engines.sglang.wire import KvAddress, check_layouts, decode_address
from engines.types import KvLayout


class Prefill(Protocol):
    def __call__(self, rid: str, ids: list[int]) -> Coroutine[Any, Any, None]:
        """Compute a prompt into the context cache. Raises `ValueError`; cancelling it aborts it."""
        ...


OnTransfer = Callable[[float, int, int], None]
"""Seconds that the transfer added to its request, bytes, and how many transfers shared the way."""


class Sending:
    """The transfers that this engine sends."""

    def __init__(
        self,
        bridge: Bridge,
        peers: Peers,
        prefill: Prefill,
        layout: KvLayout,
        new_rid: Callable[[str], str],
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_transfer: OnTransfer,
    ) -> None:
        self._bridge = bridge
        self._peers = peers
        self._prefill = prefill
        self._layout = layout
        self._new_rid = new_rid
        self._clock = clock
        self._wall = wall
        self._on_transfer = on_transfer
        self._written: dict[str, asyncio.Future[AllWritten]] = {}
        self._sends: Abortable[RemoteSendAnswer] = Abortable()

    def __len__(self) -> int:
        return len(self._sends)

    async def send(self, call: RemoteSend) -> RemoteSendAnswer:
        """Cancelling it frees what it holds; so does `abort`, and it then raises `BadRequest`."""
        address = self._checked(call)
        return await self._sends.run(call.request_id, self._send(call, address))

    def abort(self, request_id: str) -> bool:
        return self._sends.abort(request_id)

    def on_written(self, event: AllWritten) -> None:
        written = self._written.get(event.rid)
        if written is not None and not written.done():
            written.set_result(event)

    def _checked(self, call: RemoteSend) -> KvAddress:
        """What can be told to be wrong before anything is computed."""
        address = decode_address(call.kv_addr_info)
        check_layouts(self._layout, address.layout)
        if address.request_id != call.request_id:
            raise ReservationGone(f"the reservation is for request {address.request_id!r}, not {call.request_id!r}")
        if self._wall() >= address.expires_at_s:
            raise ReservationGone(f"the reservation for request {call.request_id!r} has expired")
        if (call.begin, call.end) != (address.begin, address.end):
            raise BadRequest(f"[{call.begin}, {call.end}) is not the reserved [{address.begin}, {address.end})")
        if call.end > len(call.prompt):
            raise BadRequest(f"end is {call.end}, but the prompt has only {len(call.prompt)} tokens")
        return address

    async def _send(self, call: RemoteSend, address: KvAddress) -> RemoteSendAnswer:
        await self._peers.meet(address)
        begun_s, rid = self._clock(), self._new_rid(call.request_id)
        order = Send(call_id=self._bridge.new_id(), rid=rid, prompt=pack_tokens(call.prompt), address=address)
        stop: EngineError | None = BadRequest("the caller left")
        try:
            async with asyncio.TaskGroup() as group:
                sent = group.create_task(self._bridge.ask(order, Sent))
                watch = group.create_task(self._peers.watch(address))
                prefill = group.create_task(self._compute(rid, call.prompt[: call.end]))
                outcome = await self._outcome(sent, rid, address, begun_s)
                watch.cancel()
                await prefill
            stop = None
        except* EngineError as errors:
            stop = _first(errors)
            if isinstance(stop, TransferFailed):
                self._peers.forget(address.agent)
            raise stop from None
        finally:
            if stop is not None:
                self._bridge.tell(_stop(self._bridge, rid, stop))
        return outcome

    async def _outcome(
        self, sent: asyncio.Task[Sent], rid: str, address: KvAddress, begun_s: float
    ) -> RemoteSendAnswer:
        """The receiver's word comes as a note to the scheduler, which may be in a long pass: nobody waits for that."""
        written = self._written[rid] = asyncio.get_running_loop().create_future()
        held = asyncio.create_task(self._held(written, address))
        try:
            await asyncio.wait((sent, held), return_when=asyncio.FIRST_COMPLETED)
            report = None if sent.done() else await held
            if report is None:
                report = (await sent).report
            else:
                sent.cancel()
            if written.done():
                self._on_transfer(address.reserve_s + report.transfer_s, report.bytes, report.sharing)
            return self._answer(report, begun_s)
        finally:
            held.cancel()
            del self._written[rid]

    async def _held(self, written: "asyncio.Future[AllWritten]", address: KvAddress) -> SendReport | None:
        """Once everything is written and, if the receiver checks it, found right; else `None`.

        Without a check, the receiver reads the note before anything that it is asked to do from now on.
        """
        event = await written
        if event.with_checksums and not await self._peers.holds(address):
            return None
        return msgspec.structs.replace(event.report, transfer_s=self._clock() - event.computed_s)

    def _answer(self, report: SendReport, begun_s: float) -> RemoteSendAnswer:
        """All that passed before the first pass is queue: the scheduler does not even see a call while it is in one."""
        computing_s = report.prefill_s - report.queue_s
        before_s = max(computing_s, self._clock() - report.transfer_s - begun_s)
        return RemoteSendAnswer(
            cached_length=report.cached_tokens,
            bytes=report.bytes,
            prefill_s=before_s,
            transfer_s=report.transfer_s,
            queue_s=max(0.0, before_s - computing_s),
        )

    async def _compute(self, rid: str, ids: list[int]) -> None:
        try:
            await self._prefill(rid, ids)
        except ValueError as error:
            raise BadRequest(str(error)) from error


def _stop(bridge: Bridge, rid: str, error: EngineError) -> StopSend:
    return StopSend(call_id=bridge.new_id(), rid=rid, status=error.status, code=error.code, message=error.message)


def _first(errors: BaseExceptionGroup[EngineError]) -> EngineError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if not isinstance(found, EngineError):
        raise found
    return found
