"""SGLang's own prefill-decode disaggregation over NIXL, on a CPU: a peer to measure beside.

It takes its KV pool for GPU memory wherever it lies; here it is told that the pool is host memory.
"""

import os
from typing import Any

TARGET = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"


def register() -> None:
    """Entry point of a plugin of SGLang's: does nothing unless the engine runs on a CPU."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, in_host_memory, HookType.BEFORE)


def in_host_memory(_manager: Any, kv_args: Any, *_: Any, **__: Any) -> None:
    """Before the manager registers the pool."""
    kv_args.kv_data_mem_kinds = ["DRAM"] * len(kv_args.kv_data_ptrs)
