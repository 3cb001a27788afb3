"""The peer router, `sglang-router`, as a process."""

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benchmarks.real_engines import until_ok
from controller.stack.embedded import free_port

HOST = "127.0.0.1"
STOP_S = 10.0


def missing() -> str | None:
    """Why it cannot run here."""
    if importlib.util.find_spec("sglang_router") is None:
        return "sglang-router is not installed: pip install -r requirements/bench.lock"
    return None


@contextlib.asynccontextmanager
async def sglang_router(arguments: Sequence[str], folder: Path) -> AsyncIterator[str]:
    """A router with these arguments; its address."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", *arguments, "--log-level", "warn"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port())]
    with (folder / "sglang-router.log").open("ab") as log:
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
