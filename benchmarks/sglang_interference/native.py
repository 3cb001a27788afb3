"""The peer: SGLang's own prefill-decode disaggregation over NIXL, behind sglang-router, on the same two cores."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.real_engines import peer_engine, running, two_cores
from benchmarks.sglang_router import sglang_router
from controller.stack.embedded import free_port

PLUGINS = "trimtab-cpu,trimtab-native-pd"


@contextlib.asynccontextmanager
async def native(model: Path, folder: Path) -> AsyncIterator[str]:
    """One engine that prefills, one that decodes, and their router, whose address it is."""
    bootstrap = free_port()
    common = {"disaggregation-transfer-backend": "nixl", "disaggregation-bootstrap-port": str(bootstrap)}
    first, last = two_cores()
    # On a CPU it dies of a prompt whose beginning it has cached; the prompts here share nothing anyway.
    prefill: dict[str, str | None] = {**common, "disaggregation-mode": "prefill", "disable-radix-cache": None}
    decode = {**common, "disaggregation-mode": "decode", "disaggregation-decode-retraction-backup": "cpu_tensor"}
    specs = [
        peer_engine(model, "native-prefill", first, prefill, PLUGINS),
        peer_engine(model, "native-decode", last, decode, PLUGINS),
    ]
    async with running(specs, folder) as (one, other):
        split = ["--pd-disaggregation", "--prefill", str(one.url), str(bootstrap), "--decode", str(other.url)]
        async with sglang_router(split, folder) as url:
            yield url
