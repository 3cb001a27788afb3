"""Child processes: real ones, each a few lines of Python."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from controller.stack.supervise import Child, ChildSpec, DiedAtStart, Supervisor

SERVES = """
import json, os, pathlib, signal, sys, time
def end(*_):
    print("ends", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
port = int(sys.argv[1]) or 40000 + os.getpid() % 1000
pathlib.Path(sys.argv[2]).write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
time.sleep(600)
"""
FAILS = "print('cannot read the tokenizer', flush=True); raise SystemExit(3)"
STUBBORN = SERVES.replace("sys.exit(0)", "pass")
OWNER = """
import asyncio, pathlib, sys
from controller.stack.supervise import ChildSpec, Supervisor
async def main():
    spec = ChildSpec("child", lambda port, ready: ["-c", sys.argv[1], str(port), str(ready)])
    async with Supervisor(pathlib.Path(sys.argv[2]), print) as supervisor:
        (child,) = await supervisor.start(spec)
        print(child.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
PATIENCE_S = 30.0


def spec(name: str, script: str = SERVES, stop_s: float = 5.0, env: dict[str, str] | None = None) -> ChildSpec:
    def arguments(port: int, ready: Path) -> Sequence[str]:
        return ["-c", script, str(port), str(ready)]

    return ChildSpec(name, arguments, stop_s=stop_s, env=env or {})


def is_gone(pid: int) -> bool:
    """Whether nothing runs under this id; an orphan that nobody has reaped yet runs no more either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def arguments_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.02)


def pid_of(child: Child) -> int:
    assert child.pid is not None
    return child.pid


async def test_children_end_with_the_block_last_started_first(tmp_path: Path) -> None:
    ends: list[str] = []
    async with Supervisor(tmp_path, print) as supervisor:
        first, second = await supervisor.start(spec("first"), spec("second"))
        (third,) = await supervisor.start(spec("third"))
        for child in (first, second, third):
            stop = child.stop

            async def noted(name: str = child.spec.name, stop: Callable[[], object] = stop) -> None:
                ends.append(name)
                await stop()  # type: ignore[misc]

            child.stop = noted  # type: ignore[method-assign]
        pids = [pid_of(child) for child in (first, second, third)]
    assert all(is_gone(pid) for pid in pids)
    assert ends[0] == "third"
    assert first.log_path.read_text() == "ends\n"


async def test_a_child_that_ends_before_it_is_ready_is_reported_with_its_last_words(tmp_path: Path) -> None:
    async with Supervisor(tmp_path, print) as supervisor:
        with pytest.raises(DiedAtStart, match=r"(?s)broken ended with exit code 3.*cannot read the tokenizer"):
            await supervisor.start(spec("sound"), spec("broken", FAILS))


async def test_a_child_that_dies_is_reported_and_starts_again_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.stack.supervise.FIRST_DELAY_S", 0.05)
    said: list[str] = []
    async with Supervisor(tmp_path, said.append) as supervisor:
        (child,) = await supervisor.start(spec("worker"))
        pid, url = pid_of(child), child.url
        os.kill(pid, signal.SIGKILL)
        await until(lambda: any("serves again" in line for line in said))
        assert pid_of(child) != pid
        assert child.url == url
    assert "worker ended with signal 9" in said[0]
    assert supervisor.deaths == 1


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with Supervisor(tmp_path, print) as supervisor:
        (child,) = await supervisor.start(spec("stubborn", STUBBORN, stop_s=0.2))
        pid = pid_of(child)
    assert is_gone(pid)


async def test_kill_all_does_not_wait_for_anybody(tmp_path: Path) -> None:
    async with Supervisor(tmp_path, print) as supervisor:
        (child,) = await supervisor.start(spec("stubborn", STUBBORN, stop_s=600))
        supervisor.kill_all()
        await child.ended()


async def test_secrets_travel_by_environment(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['TRIMTAB_X'], sys.argv, flush=True)\n" + SERVES
    async with Supervisor(tmp_path, print) as supervisor:
        (child,) = await supervisor.start(spec("child", script, env={"TRIMTAB_X": "swordfish"}))
        assert child.log_path.read_text().startswith("swordfish ")
        assert "swordfish" not in arguments_of(pid_of(child))


async def test_children_die_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, SERVES, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    child_pid = int(await owner.stdout.readline())
    assert not is_gone(child_pid)
    owner.kill()
    await owner.wait()
    await until(lambda: is_gone(child_pid))
