"""The embedded Redis: a real server where there is one, and nothing left of it afterwards."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from controller.stack import embedded
from controller.stack.embedded import RedisDidNotStart, embedded_redis, find_server

LIVENESS_S = 20.0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made during the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_server_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_it_answers_and_leaves_no_process_port_or_file(temporary: Path, free_port: Callable[[], int]) -> None:
    port = free_port()
    async with embedded_redis(port) as server:
        async with Redis.from_url(server.url) as client:
            assert await client.set("a", "b")
            await client.save()
        pid = server.pid
        assert pid is not None
        assert is_running(pid)
        assert listens(port)
        assert names_in(temporary)
    assert not is_running(pid)
    assert not listens(port)
    assert names_in(temporary) == []


async def test_it_listens_on_loopback_only() -> None:
    async with embedded_redis() as server:
        connections = psutil.Process(server.pid).net_connections()
        assert {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


async def test_nothing_is_left_when_the_block_raises(temporary: Path) -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with embedded_redis() as server:
            assert server.pid is not None
            pids.append(server.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert pids
    assert not is_running(pids[0])
    assert names_in(temporary) == []


async def test_a_data_folder_that_was_given_stays(tmp_path: Path) -> None:
    async with embedded_redis(data_dir=tmp_path / "redis"):
        pass
    assert (tmp_path / "redis").is_dir()


async def test_after_a_kill_it_starts_again_empty_on_the_same_port() -> None:
    async with embedded_redis() as server:
        async with Redis.from_url(server.url) as client:
            await client.set("a", "b")
        before = server.pid
        await server.kill()
        assert server.pid is None
        assert before is not None
        assert not is_running(before)
        await server.start()
        assert server.pid != before
        async with Redis.from_url(server.url) as client:
            assert await client.get("a") is None


async def test_a_stuck_server_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.1)
    async with embedded_redis() as server:
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    assert not is_running(pid)


async def test_a_port_in_use_is_refused_although_something_answers_there(redis_url: str) -> None:
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(RedisDidNotStart, match=rf"port {port} .* is in use"):
        async with embedded_redis(port):
            pytest.fail("started")


async def test_a_server_that_ends_at_once_is_reported_with_its_last_words(temporary: Path) -> None:
    broken = embedded.Server((sys.executable, "-c", "raise SystemExit('no luck today')"), False, "broken")
    with pytest.raises(RedisDidNotStart, match=r"ended with code 1.*no luck today"):
        async with embedded_redis(server=broken):
            pytest.fail("started")
    assert names_in(temporary) == []


def test_a_server_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "redis-server"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_server()
    assert found.program == (str(program),)
    assert str(program) in found.source


@pytest.mark.usefixtures("no_server_installed")
async def test_without_any_server_an_imitation_answers_and_says_so(temporary: Path) -> None:
    async with embedded_redis() as server:
        assert "imitation" in server.source
        pid = server.pid
        async with Redis.from_url(server.url) as client:
            await client.set("a", b"\r\n\x00")
            assert await client.get("a") == b"\r\n\x00"
    assert pid is not None
    assert not is_running(pid)
    assert names_in(temporary) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
async def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = """
import asyncio
from controller.stack.embedded import embedded_redis

async def main():
    async with embedded_redis() as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        async with asyncio.timeout(LIVENESS_S):
            assert parent.stdout is not None
            pid = int(await parent.stdout.readline())
            assert is_running(pid)
    finally:
        parent.kill()
        await parent.wait()
    async with asyncio.timeout(LIVENESS_S):
        while is_running(pid):
            await asyncio.sleep(0.02)
