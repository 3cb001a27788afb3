"""Context-cache migration by the engines' own verbs: the KV of a prompt's beginning, from one engine to another."""

import msgspec
import structlog

from engines.client import EngineClient, Prompt
from engines.errors import EngineError
from engines.tracing import Trace

RESERVATION_S = 60.0

log = structlog.get_logger(__name__)


class Moved(msgspec.Struct, frozen=True):
    """What one copy did."""

    already_there_tokens: int
    moved_tokens: int
    bytes: int = 0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


async def copy_context(
    request_id: str,
    sender: EngineClient,
    receiver: EngineClient,
    prompt: Prompt,
    end: int,
    trace: Trace | None = None,
) -> Moved:
    """`prep_recv` and `remote_send` of `prompt[:end]`; the receiver's pin is lifted in any case.

    `0 < end < prompt.tokens`: the last token stays behind, as every generation computes it itself. Raises the
    `EngineError` that either engine answered.
    """
    try:
        room = await receiver.prep_recv(request_id, prompt, end, RESERVATION_S, trace)
        begin = room.prefix_matched_length
        if begin >= end:
            return Moved(begin, 0)
        sent = await sender.remote_send(request_id, prompt, room.kv_addr_info, begin, end, trace)
        return Moved(begin, end - begin, sent.bytes, sent.prefill_s, sent.transfer_s)
    finally:
        await _unpin(request_id, receiver, trace)


async def _unpin(request_id: str, receiver: EngineClient, trace: Trace | None) -> None:
    """Nothing will consume the reservation, so without this its tokens could not be evicted until it expires."""
    try:
        await receiver.abort(request_id, trace)
    except EngineError as error:
        trace_id = trace.trace_id if trace is not None else None
        log.warning("reservation left to expire", request_id=request_id, trace_id=trace_id, error=error.for_logs)
