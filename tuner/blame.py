"""What a missed SLO is put down to: one rule for the routers' metrics, for observed records and for simulated requests.

Light on purpose: routers apply it to every request.
"""

import enum

from engines.records import Outcome, RequestRecord
from tuner.slo import Slo


class Bound(enum.StrEnum):
    TTFT = "ttft"
    TPOT = "tpot"


class Cause(enum.StrEnum):
    """What a missed SLO is put down to: the largest part of the time that was too long."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    REFUSED = "refused"
    """Shed, or refused for want of room."""
    ERROR = "error"
    """Failed or timed out; or late because engines failed on the way."""


PARTS = (Cause.QUEUE, Cause.PREFILL, Cause.TRANSFER, Cause.DECODE)
"""In the order in which a request goes through them."""

Miss = tuple[Bound, Cause]

NOT_COUNTED = frozenset({Outcome.CLIENT_LEFT, Outcome.REJECTED})
"""Endings that say nothing about whether the fleet keeps its promise; attainment leaves them out."""

REFUSALS = frozenset({Outcome.SHED, Outcome.NO_ROOM})


def misses(record: RequestRecord, slo: Slo) -> tuple[Miss, ...]:
    """Which bounds a finished request missed, and why; empty if it met both or does not count.

    A request that was refused or failed has missed both; of one that was given up, only the first is known.
    """
    if record.outcome in NOT_COUNTED:
        return ()
    if record.outcome is Outcome.GAVE_UP:
        return ((Bound.TTFT, ttft_cause(record)),)
    if record.outcome is not Outcome.OK:
        cause = Cause.REFUSED if record.outcome in REFUSALS else Cause.ERROR
        return (Bound.TTFT, cause), (Bound.TPOT, cause)
    missed: tuple[Miss, ...] = ()
    if record.ttft_s is None or record.ttft_s * 1e3 > slo.ttft_ms:
        missed += ((Bound.TTFT, ttft_cause(record)),)
    if record.tpot_s is not None and record.tpot_s * 1e3 > slo.tpot_ms:
        missed += ((Bound.TPOT, Cause.ERROR if record.resumed else Cause.DECODE),)
    return missed


def ttft_cause(record: RequestRecord) -> Cause:
    """The largest part of the time to the first token, or of the wait for it. Of equal ones the first in `PARTS`.

    What no part accounts for went by before an engine began: in queues, or on engines that failed.
    """
    # An answer that is not streamed has its first token with its last.
    decode_s = 0.0 if record.stream else record.decode_s or 0.0
    parts_s = (record.queue_s or 0.0, record.prefill_s or 0.0, record.transfer_s or 0.0, decode_s)
    largest_s = max(parts_s)
    waited_s = record.e2e_s if record.ttft_s is None else record.ttft_s
    if waited_s - sum(parts_s) > largest_s:
        return Cause.ERROR if record.attempts > 1 else Cause.QUEUE
    return PARTS[parts_s.index(largest_s)]
