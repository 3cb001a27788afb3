"""The peer: SGLang's own prefill-decode disaggregation over NIXL, behind sglang-router, on the same two cores."""

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.real_engines import peer_engine, running, two_cores, until_ok
from controller.stack.embedded import free_port
from controller.stack.supervise import Child

PLUGINS = "trimtab-cpu,trimtab-native-pd"
HOST = "127.0.0.1"
STOP_S = 10.0


def missing() -> str | None:
    """Why the peer cannot run here."""
    if importlib.util.find_spec("sglang_router") is None:
        return "sglang-router is not installed: pip install -r requirements/bench.lock"
    return None


@contextlib.asynccontextmanager
async def native(model: Path, folder: Path) -> AsyncIterator[str]:
    """One engine that prefills, one that decodes, and their router, whose address it is."""
    bootstrap = free_port()
    common = {"disaggregation-transfer-backend": "nixl", "disaggregation-bootstrap-port": str(bootstrap)}
    first, last = two_cores()
    prefill = {**common, "disaggregation-mode": "prefill"}
    decode = {**common, "disaggregation-mode": "decode", "disaggregation-decode-retraction-backup": "cpu_tensor"}
    specs = [
        peer_engine(model, "native-prefill", first, prefill, PLUGINS),
        peer_engine(model, "native-decode", last, decode, PLUGINS),
    ]
    async with running(specs, folder) as (one, other), _router(one, bootstrap, other, folder) as url:
        yield url


@contextlib.asynccontextmanager
async def _router(prefill: Child, bootstrap: int, decode: Child, folder: Path) -> AsyncIterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", str(prefill.url), str(bootstrap), "--decode", str(decode.url), "--log-level", "warn"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port())]
    with (folder / "sglang-router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=subprocess.STDOUT)
    try:
        await until_ok(f"http://{HOST}:{port}/readiness")
        yield f"http://{HOST}:{port}"
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
