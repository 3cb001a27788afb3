"""What is told about a request once it has ended: its record, and a log line where requests are logged."""

from collections.abc import Callable

import msgspec

from controller.router.call import Call
from controller.router.http import Request
from controller.router.relay import Delivery
from controller.settings import LogRequests
from engines.records import RequestRecord
from tuner.prefix import sketch

RequestLog = Callable[[Call, RequestRecord], None]

UNLOGGED = frozenset({"request_id", "prefix_hashes"})
"""Fields of a record: one that every line has anyhow, and one that says nothing to a reader."""


def record_of(
    call: Call, request: Request, delivery: Delivery, router_id: str, now_s: float, wall_clock_s: float
) -> RequestRecord:
    """`now_s` and `wall_clock_s` are the same moment, monotonic and as Unix time."""
    timings = delivery.timings
    output_tokens = delivery.output_tokens if delivery.first_s is not None else None
    tpot_s = None
    if call.asked.stream and output_tokens is not None and output_tokens > 1 and delivery.first_s is not None:
        tpot_s = (delivery.last_s - delivery.first_s) / (output_tokens - 1)
    return RequestRecord(
        request_id=call.request_id,
        router_id=router_id,
        slo_class=call.slo_class,
        arrived_at_s=wall_clock_s - (now_s - request.arrived_s),
        outcome=delivery.outcome,
        status=delivery.status,
        error_code=delivery.error_code,
        api=call.asked.api,
        stream=call.asked.stream,
        pattern=call.plan.pattern,
        plan_version=call.plan.version,
        prefill_engine=call.prefill_engine,
        decode_engine=call.decode_engine,
        attempts=call.attempts,
        resumed=call.resumed,
        prompt_tokens=timings.prompt_tokens if timings else call.prompt_tokens,
        cached_tokens=timings.cached_tokens if timings else None,
        output_tokens=output_tokens,
        split_begin=call.split_begin,
        split_end=call.split_end,
        transferred_bytes=call.transferred_bytes,
        transfer_failures=call.transfer_failures,
        transfer_retries=call.transfer_retries,
        ttft_s=delivery.first_s - request.arrived_s if delivery.first_s is not None else None,
        tpot_s=tpot_s,
        e2e_s=now_s - request.arrived_s,
        queue_s=call.waited_s + call.queued_s + (timings.queue_s if timings else 0.0),
        prefill_s=_sum(call.prefill_s, timings.prefill_s if timings else None),
        transfer_s=call.transfer_s,
        decode_s=timings.decode_s if timings else None,
        prefix_hashes=sketch(call.hashes) or None,
    )


def request_log(mode: LogRequests) -> RequestLog | None:
    """What logs each request that has ended; `None` if none are to be logged."""
    if mode == "off":
        return None

    def log(call: Call, record: RequestRecord) -> None:
        told = {name: value for name, value in msgspec.structs.asdict(record).items() if value is not None}
        if mode == "prompts":
            told["prompt"] = call.asked.content.decode(errors="replace")
        call.log.info("request_ended", **{name: value for name, value in told.items() if name not in UNLOGGED})

    return log


def _sum(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else first + second
