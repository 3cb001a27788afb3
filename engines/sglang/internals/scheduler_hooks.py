"""What SGLang's scheduler calls, and how it describes its passes."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.utils import TypeBasedDispatcher

from engines.errors import told
from engines.sglang.internals.carried import TrimtabCall, is_ours
from engines.sglang.scheduler import Handler
from engines.sglang.view import Computed, Pass

log = structlog.get_logger(__name__)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker."


class SchedulerHooks:
    """What SGLang's scheduler calls. Inert until the scheduler of this process has been set up."""

    def __init__(self, make_handler: Callable[[Any], Handler]) -> None:
        self._make_handler = make_handler
        self._handler: Handler | None = None
        self._housekeeping = False

    def register(self) -> None:
        hooks: Sequence[tuple[str, Callable[..., Any], HookType]] = (
            (SCHEDULER + "init_request_dispatcher", self.after_init, HookType.AFTER),
            (SCHEDULER + "process_input_requests", self.after_inputs, HookType.AFTER),
            (SCHEDULER + "handle_generate_request", self.before_generate, HookType.BEFORE),
            (SCHEDULER + "stash_chunked_request", self.after_stash, HookType.AFTER),
            (SCHEDULER + "process_batch_result", self.after_pass, HookType.AFTER),
            (SCHEDULER + "on_idle", self.around_idle, HookType.AROUND),
            (SCHEDULER + "maybe_sleep_on_idle", self.around_sleep, HookType.AROUND),
            (SCHEDULER + "is_fully_idle", self.after_is_idle, HookType.AFTER),
            (SCHEDULER + "flush_cache", self.before_flush, HookType.BEFORE),
            (SCHEDULER + "_add_request_to_queue", self.before_queue, HookType.BEFORE),
            (SCHEDULER + "send_abort_output", self.after_abort, HookType.AFTER),
            (CHECKER + "_check_full_pool", self.before_pool_check, HookType.BEFORE),
        )
        for target, hook, kind in hooks:
            HookRegistry.register(target, hook, kind)

    def after_init(self, _: Any, scheduler: Any) -> None:
        self._handler = self._make_handler(scheduler)
        calls = [(TrimtabCall, self.on_call)]
        scheduler._request_dispatcher += TypeBasedDispatcher(calls)

    def on_call(self, call: TrimtabCall) -> None:
        if self._handler is not None:
            self._handler.on_call(call.payload)

    def after_inputs(self, _: Any, scheduler: Any, *__: Any) -> None:
        if self._handler is not None:
            busy = scheduler.chunked_req is not None or not scheduler.running_batch.is_empty()
            self._handler.poll(busy=busy)

    def before_generate(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        if self._handler is not None and is_ours(request.rid):
            self._handler.on_arrival(request.rid)

    def before_queue(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """A resumed answer's grammar, complete by now, stands where the answer broke off."""
        tokens = () if self._handler is None else self._handler.take_replay(request.rid)
        if tokens and isinstance(request.grammar, BaseGrammarObject):
            _advance(request.grammar, tokens)

    def after_abort(self, _: Any, __: Any, ___: Any, request: Any) -> None:
        if self._handler is not None:
            self._handler.on_dropped(request.rid)

    def after_stash(self, _: Any, __: Any, request: Any) -> None:
        if self._handler is not None:
            self._handler.on_stashed(request.rid, request.prefix_len, request)

    def after_pass(self, _: Any, scheduler: Any, batch: Any, *__: Any) -> None:
        if self._handler is not None and not batch.forward_mode.is_idle():
            self._handler.on_pass(_pass(batch, scheduler))

    def around_idle(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """SGLang's housekeeping may run while memory is promised: it is told how much that is."""
        if self._handler is not None:
            self._handler.on_idle()
        self._housekeeping = True
        try:
            return original(scheduler)
        finally:
            self._housekeeping = False

    def around_sleep(self, original: Callable[..., Any], scheduler: Any) -> Any:
        if self._handler is None or scheduler.idle_sleeper is None or not self._handler.holds_memory:
            return original(scheduler)
        return self._handler.rest(scheduler.idle_sleeper.poller.poll, time.sleep)

    def after_is_idle(self, idle: bool, _: Any, for_health_check: bool = False, **__: Any) -> bool:
        """Nobody may empty the cache or the pool while memory is promised."""
        if self._handler is None or self._housekeeping or for_health_check:
            return idle
        return idle and not self._handler.holds_memory

    def before_flush(self, *_: Any, **__: Any) -> None:
        if self._handler is not None:
            self._handler.before_flush()

    def before_pool_check(self, checker: Any, stats: Any, uncached: int = 0) -> Any:
        reserved_tokens = 0 if self._handler is None else self._handler.reservations.tokens
        return (checker, stats), {"uncached": uncached + reserved_tokens}


def _advance(grammar: Any, tokens: Sequence[int]) -> None:
    try:
        for token in tokens:
            grammar.accept_token(token)
    except ValueError as error:
        # The message would quote what was generated.
        log.warning("what another engine generated breaks the grammar; going on from where it did", error=told(error))


def _pass(batch: Any, scheduler: Any) -> Pass:
    extends = batch.forward_mode.is_extend()
    decoding = {req.rid for req in batch.decoding_reqs or ()} if extends else None
    prefills = list(_computed(batch, decoding)) if extends else []
    others = [req for req in batch.reqs if decoding is None or req.rid in decoding]
    return Pass(
        launched_s=batch.launch_ts,
        ended_s=time.monotonic(),
        prefills=prefills,
        decode_batch=len(others),
        kv_tokens=sum(req.seqlen for req in others),
        queued=len(scheduler.waiting_queue) + (not extends and scheduler.chunked_req is not None),
        finished=sum(req.finished() for req in batch.reqs),
    )


def _computed(batch: Any, decoding: Any) -> Iterator[Computed]:
    for req, begin, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False):
        if req.rid in decoding:
            continue
        reason = req.finished_reason
        yield Computed(
            rid=req.rid,
            begin=int(begin),
            to=int(begin) + int(count),
            through=int(begin) + int(count) >= len(req.origin_input_ids),
            aborted=reason is not None and reason.to_json().get("type") == "abort",
            cached_tokens=int(req.cached_tokens),
            request=req,
        )
