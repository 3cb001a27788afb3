"""The scheduler's cache, pool, load and knobs."""

import array
from typing import Any

import numpy as np
import torch
import xxhash
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from engines.protocol import Config
from engines.sglang.internals.carried import TrimtabReport
from engines.sglang.slots import Rows, rows_of
from engines.sglang.view import Loads
from engines.sglang.wire import Buffer
from engines.types import KvLayout

HEALTH_CHECK_PREFIX = "HEALTH_CHECK"
MAX_EXPECTED_OUTPUT = 4096
DTYPE_NAMES = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


class SchedulerView:
    """`engines.sglang.view.View` over a live scheduler."""

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
        # SGLang has left as much memory free as passes of this size take; `None` where prompts must not be cut at all.
        self._most_chunk_tokens = scheduler.chunked_prefill_size
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
        if wanted.chunked_prefill_tokens is not None and self._most_chunk_tokens:
            chunk_tokens = min(wanted.chunked_prefill_tokens, self._most_chunk_tokens)
            self._scheduler.chunked_prefill_size = chunk_tokens // self.page_size * self.page_size
        if wanted.prefill_decode_interval is not None:
            self._scheduler.prefill_decode_interval = wanted.prefill_decode_interval
            self._scheduler._prefill_decode_interval_remaining = 0

    def report(self, payload: bytes) -> None:
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(TrimtabReport(payload=payload))


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
