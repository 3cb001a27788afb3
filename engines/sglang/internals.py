"""The one module that touches SGLang's internals. Tested with the versions in `TESTED_VERSIONS`.

Everything is done with hooks that SGLang offers to plugins; nothing of SGLang's is changed on disk. Imported inside
SGLang's processes only.
"""

import array
import contextlib
import copy
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import structlog
import torch
import xxhash
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.io_struct import AbortReq, BaseReq, GenerateReqInput, hook_custom_types
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.utils import TypeBasedDispatcher

from engines.errors import told
from engines.protocol import Config
from engines.sglang.messages import RID_PREFIX
from engines.sglang.scheduler import Handler
from engines.sglang.slots import Rows, rows_of
from engines.sglang.view import Computed, Loads, Pass
from engines.sglang.wire import Buffer
from engines.types import KvLayout

log = structlog.get_logger(__name__)
TESTED_VERSIONS = ("0.5.23",)
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
CHECKER = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker."
CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
HEALTH_CHECK_PREFIX = "HEALTH_CHECK"
MAX_EXPECTED_OUTPUT = 4096
DTYPE_NAMES = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


class UntestedVersion(Exception):
    """This SGLang is another than what the plugin was tested with."""


def check_version(allow_untested: bool) -> None:
    """Raises `UntestedVersion`."""
    found = version("sglang")
    if found not in TESTED_VERSIONS and not allow_untested:
        raise UntestedVersion(
            f"Trimtab's plugin was tested with SGLang {', '.join(TESTED_VERSIONS)}, this is {found}. Install a tested "
            "version, set TRIMTAB_SGLANG_UNTESTED_VERSION=1 to try all the same, or leave the plugin out with "
            "SGLANG_PLUGINS."
        )


class TrimtabCall(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """From the HTTP process to the scheduler; see `messages`."""

    payload: bytes


class TrimtabReport(BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """From the scheduler to the HTTP process."""

    payload: bytes


# ---- The scheduler process.


class SchedulerView:
    """`scheduler.View` over a live scheduler."""

    def __init__(self, scheduler: Any, model: str) -> None:
        self._scheduler = scheduler
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._pool = self._allocator.get_kvcache()
        self.page_size = int(scheduler.page_size)
        self.capacity_tokens = int(scheduler.max_total_num_tokens)
        self.context_length_tokens = int(scheduler.model_config.context_len)
        self.vocab_size = int(scheduler.model_config.vocab_size)
        self.device = str(scheduler.device)
        self.memory = "DRAM" if self.device == "cpu" else "VRAM"
        self.device_id = 0 if self.device == "cpu" else int(torch.get_device_module(self.device).current_device())
        self.layout = _layout(self._pool, model, self.page_size, int(scheduler.tp_size))
        self.buffers = _buffers(self._pool) if self.obstacle is None else ()
        self.bytes_per_token = sum(buffer.row_bytes for buffer in self.buffers) // self.page_size

    @property
    def obstacle(self) -> str | None:
        """Why KV cannot be exchanged, if it cannot."""
        scheduler, pool = self._scheduler, self._pool
        obstacles = {
            "tensor parallelism": scheduler.tp_size > 1,
            "data parallelism inside the engine": scheduler.server_args.dp_size > 1,
            "pipeline parallelism": scheduler.server_args.pp_size > 1,
            "a hybrid KV cache": scheduler.is_hybrid_swa or scheduler.is_hybrid_ssm,
            "--disable-radix-cache": scheduler.disable_radix_cache,
            "speculative decoding": not scheduler.spec_algorithm.is_none(),
            "this attention's KV layout": getattr(pool, "head_dim", None) != getattr(pool, "v_head_dim", 0),
        }
        return next((f"KV is not exchanged with {name}" for name, found in obstacles.items() if found), None)

    # The context cache and the pool.

    def match(self, ids: bytes) -> tuple[int, Any]:
        found = self._tree.match_prefix(MatchPrefixParams(key=_key(ids)))
        return int(found.device_prefix_len), found.last_device_node

    def lock(self, node: Any) -> Any:
        return self._tree.lock(node)

    def unlock(self, lock: Any) -> None:
        self._tree.unlock(lock)

    def allocate(self, tokens: int, spare_tokens: int) -> Rows | None:
        if self._allocator.available_size() + self._tree.evictable_size() < tokens + spare_tokens:
            return None
        evict_from_tree_cache(self._tree, tokens)
        self._allocator.merge_and_sort_free()
        slots = self._allocator.alloc(tokens)
        return None if slots is None else _to_numpy(slots)

    def free(self, slots: Rows) -> None:
        self._allocator.free(self._to_tensor(slots))

    def insert(self, ids: bytes, matched: int, node: Any, slots: Rows) -> Any:
        path = self._tree.path_device_indices(node)[:matched].to(torch.int64)
        value = torch.cat((path, self._to_tensor(slots)))
        result = self._tree.insert(InsertParams(key=_key(ids), value=value, prev_prefix_len=matched))
        return result.last_device_node

    def path_slots(self, node: Any) -> Rows:
        return _to_numpy(self._tree.path_device_indices(node))

    def request_slots(self, request: Any, begin: int, to: int) -> Rows:
        table = self._scheduler.req_to_token_pool.req_to_token
        return _to_numpy(table[request.kv.req_pool_idx, begin:to])

    def request_ids(self, request: Any, to: int) -> bytes:
        return np.array(request.origin_input_ids[:to], dtype=np.int32).tobytes()

    def rows(self, slots: Rows) -> Rows:
        return rows_of(slots, self.page_size)

    def checksum(self, slots: Rows) -> int:
        digest = xxhash.xxh3_64()
        index = self._to_tensor(slots)
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            digest.update(buffer[index].contiguous().view(torch.uint8).cpu().numpy())
        return digest.intdigest()

    def _to_tensor(self, slots: Rows) -> Any:
        return torch.from_numpy(np.ascontiguousarray(slots)).to(self._allocator.device)

    # Load and knobs.

    def spare_tokens(self) -> int:
        """What running requests are expected to need, as SGLang's own admission reckons."""
        ratio = self._scheduler.new_token_ratio_tracker.current
        missing = (
            min(req.sampling_params.max_new_tokens - len(req.output_ids), MAX_EXPECTED_OUTPUT)
            for req in self._scheduler.running_batch.reqs
            if not req.finished()
        )
        return int(sum(missing) * ratio)

    def loads(self) -> Loads:
        scheduler = self._scheduler
        live = {req for req in scheduler.collect_inflight_reqs() if not req.finished()}
        if scheduler.chunked_req is not None:
            live.add(scheduler.chunked_req)
        waiting = (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue)
        free = self._allocator.available_size() + self._tree.evictable_size()
        return Loads(
            running=_count_real(live),
            queued=_count_real(waiting),
            pending_prefill_tokens=int(scheduler.load_inquirer.get_num_waiting_uncached_tokens()),
            outside_cache_tokens=self.capacity_tokens - int(free),
        )

    def knobs(self) -> Config:
        scheduler = self._scheduler
        return Config(
            chunked_prefill_tokens=scheduler.chunked_prefill_size,
            prefill_decode_interval=scheduler.prefill_decode_interval,
        )

    def set_knobs(self, wanted: Config) -> None:
        if wanted.chunked_prefill_tokens is not None:
            self._scheduler.chunked_prefill_size = wanted.chunked_prefill_tokens // self.page_size * self.page_size
        if wanted.prefill_decode_interval is not None:
            self._scheduler.prefill_decode_interval = wanted.prefill_decode_interval
            self._scheduler._prefill_decode_interval_remaining = 0

    def report(self, payload: bytes) -> None:
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(TrimtabReport(payload=payload))


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
        if self._handler is not None and _is_ours(request.rid):
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
            self._handler.on_pass(_pass(batch, len(scheduler.waiting_queue)))

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


def _pass(batch: Any, queued: int) -> Pass:
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
        queued=queued,
        finished=sum(req.finished() for req in batch.reqs),
    )


def _computed(batch: Any, decoding: Any) -> Any:
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


def _is_ours(rid: str | None) -> bool:
    return (rid or "").startswith(RID_PREFIX)


def _count_real(requests: Any) -> int:
    return sum(not req.rid.startswith(HEALTH_CHECK_PREFIX) for req in requests)


def _key(ids: bytes) -> Any:
    return RadixKey(array.array("q", np.frombuffer(ids, dtype=np.int32).astype(np.int64).tobytes()))


def _to_numpy(slots: Any) -> Rows:
    found: Rows = slots.to(torch.int64).cpu().numpy().copy()
    return found


def _layout(pool: Any, model: str, page_size: int, tensor_parallel: int) -> KvLayout:
    dtype = str(pool.dtype).removeprefix("torch.")
    return KvLayout(
        model=model,
        dtype=DTYPE_NAMES.get(dtype, dtype),
        layers=int(pool.layer_num),
        kv_heads=int(getattr(pool, "head_num", 1)),
        head_dim=int(getattr(pool, "head_dim", 1)),
        page_size_tokens=page_size,
        tensor_parallel=tensor_parallel,
    )


def _buffers(pool: Any) -> tuple[Buffer, ...]:
    bases, lengths, row_bytes = pool.get_contiguous_buf_infos()
    return tuple(
        Buffer(int(base), int(width), int(length) // int(width))
        for base, length, width in zip(bases, lengths, row_bytes, strict=True)
    )


# ---- The HTTP process.


class Observer(Protocol):
    """Looks on, and takes part, while SGLang serves one request."""

    def generate(
        self, original: Callable[..., AsyncGenerator[Any, None]], obj: Any, request: Any
    ) -> AsyncGenerator[Any, None]: ...
    def on_requests(self, rids: Sequence[str]) -> None: ...
    def on_tokenized(self, rid: str, ids: Any) -> Any:
        """The ids to serve instead, or `None`."""
        ...


class _Observing:
    """Mixed into SGLang's tokenizer manager, one light object a request over the state of the real one."""

    __slots__ = ()
    observer: Observer

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        original = super().generate_request  # type: ignore[misc]
        async with contextlib.aclosing(self.observer.generate(original, obj, request)) as answers:
            async for answer in answers:
                yield answer

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        super()._init_req_state(obj, request)  # type: ignore[misc]
        self.observer.on_requests([obj.rid] if isinstance(obj.rid, str) else obj.rid)

    async def _tokenize_one_request(self, obj: Any) -> Any:
        tokenized = await super()._tokenize_one_request(obj)  # type: ignore[misc]
        ids = self.observer.on_tokenized(obj.rid, tokenized.input_ids)
        if ids is not None:
            tokenized.input_ids = array.array("q", ids)
        return tokenized


class Frontend:
    """SGLang's HTTP process."""

    def __init__(self, tokenizer_manager: Any, app: Any) -> None:
        self._manager = tokenizer_manager
        self.app = app
        self.on_abort: Callable[[], None] = lambda: None
        """Called when a generation that is none of ours is aborted."""
        bases = (_Observing, type(tokenizer_manager))
        self._observing = type("ObservedTokenizerManager", bases, {"__slots__": ("observer",)})

    @property
    def model(self) -> str:
        return str(self._manager.served_model_name)

    @property
    def host_port(self) -> tuple[str, int]:
        return str(self._manager.server_args.host), int(self._manager.server_args.port)

    @property
    def exports_metrics(self) -> bool:
        return bool(self._manager.server_args.enable_metrics)

    def start(self) -> None:
        """Take answers from the scheduler; from the event loop."""
        self._manager.auto_create_handle_loop()

    def send(self, payload: bytes) -> None:
        self._manager._dispatch_to_scheduler(TrimtabCall(payload=payload))

    def encode(self, text: str) -> list[int]:
        """Token ids of text that goes on where other text ended."""
        return list(self._manager.tokenizer.encode(text, add_special_tokens=False))

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def dispatch_abort(self, rid: str) -> None:
        """Abort in the scheduler what this process has no state of."""
        self._manager._dispatch_to_scheduler(AbortReq(rid=rid))

    async def prefill(self, rid: str, ids: list[int]) -> None:
        """Compute a prompt into the context cache. Raises `ValueError`; cancelling it aborts it."""
        params = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        request = GenerateReqInput(rid=rid, input_ids=ids, sampling_params=params, log_metrics=False)
        async with contextlib.aclosing(self._manager.generate_request(request)) as answers:
            async for _ in answers:
                pass

    async def serve(self, api: str, body: Any, rid: str, observer: Observer, raw_request: Any) -> Any:
        """What SGLang's own endpoint answers to `body`. Raises `pydantic.ValidationError`, `ValueError`."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

        kind = ChatCompletionRequest if api == "chat" else CompletionRequest
        request = kind.model_validate(body)
        request.rid = rid
        state = self.app.state
        endpoint = copy.copy(state.openai_serving_chat if api == "chat" else state.openai_serving_completion)
        endpoint.tokenizer_manager = self._observed(observer)
        return await endpoint.handle_request(request, raw_request)

    def _observed(self, observer: Observer) -> Any:
        observed: Any = object.__new__(self._observing)
        observed.__dict__ = self._manager.__dict__
        observed.observer = observer
        return observed


class FrontendHooks:
    """What SGLang's HTTP process calls while it starts."""

    def __init__(self, attach: Callable[[Frontend], Callable[[bytes], None]]) -> None:
        self._attach = attach
        self._frontend: Frontend | None = None

    def register(self) -> None:
        HookRegistry.register(CONTROL + "init_communicators", self.after_init, HookType.AFTER)
        HookRegistry.register(TOKENIZER + "abort_request", self.before_abort, HookType.BEFORE)
        HookRegistry.register(TOKENIZER + "_validate_one_request", self.before_validation, HookType.BEFORE)

    def after_init(self, _: Any, manager: Any) -> None:
        server = sys.modules.get(HTTP_SERVER)
        if server is None:
            return
        self._frontend = Frontend(manager, server.app)
        on_report = self._attach(self._frontend)
        reports = [(TrimtabReport, lambda report: on_report(report.payload))]
        manager._result_dispatcher += TypeBasedDispatcher(reports)

    @staticmethod
    def before_validation(manager: Any, _: Any, ids: Any) -> None:
        """SGLang looks up whatever ids it gets and dies of those it has not. It answers a `ValueError` with 400."""
        vocab_size = int(manager.model_config.vocab_size)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"token ids must be 0 to {vocab_size - 1}")

    def before_abort(self, manager: Any, rid: str = "", abort_all: bool = False) -> None:
        state = manager.rid_to_state.get(rid)
        if self._frontend is not None and state is not None and not state.abort_sent and not _is_ours(rid):
            self._frontend.on_abort()


def register_messages() -> None:
    hook_custom_types(TrimtabCall, TrimtabReport)
