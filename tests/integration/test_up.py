"""`trimtab up` as an operator runs it: one real command, and everything it starts."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from redis import Redis

from controller.stack.running import RunningStack, find_running
from tests.support.up import (
    STOP_S,
    Up,
    children_of,
    descendants_of,
    end_hard,
    environment_of,
    records,
    runs,
    until_announced,
    wait_until,
)

TRIMTAB = [sys.executable, "-m", "controller.cli"]


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    return environment_of(tmp_path)


StartUp = Callable[..., "Up"]


@pytest.fixture
def start_up(environment: Mapping[str, str], tmp_path: Path) -> Iterator[StartUp]:
    """Start `trimtab up` with more flags on free ports; ended at the end if the test did not."""
    with contextlib.ExitStack() as held:

        def start(*flags: str) -> Up:
            output = tmp_path / "up.out"
            process = begin_up(environment, output, *flags)
            held.callback(end_hard, process)
            return Up(process, until_announced(process, tmp_path / "trimtab", output), output)

        yield start


def begin_up(environment: Mapping[str, str], output: Path, *flags: str) -> subprocess.Popen[str]:
    command = [*TRIMTAB, "up", "--engines", "2", "--port", "0", "--admin-port", "0", *flags]
    with output.open("w") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out, text=True)


def chat(stack: RunningStack, api_key: str = "none") -> str:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=api_key, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=stack.model, messages=[{"role": "user", "content": "Hello there"}], max_tokens=8, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def trimtab(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRIMTAB, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_a_chat_streams_a_plan_changes_live_and_ctrl_c_leaves_nothing(
    start_up: StartUp, environment: Mapping[str, str], tmp_path: Path
) -> None:
    up = start_up()
    assert chat(up.stack)
    changed = trimtab(environment, "plan", "set", "balanced", "--offload-ratio", "0.1")
    assert changed.returncode == 0, changed.stderr
    assert "version 2 applied by 1 of 1 routers" in changed.stdout
    assert chat(up.stack)
    wait_until(lambda: len(records(up.stack)) == 2, "both records are in the stream")
    assert [(record.pattern, record.plan_version) for record in records(up.stack)] == [
        ("data_parallel", 1),
        ("balanced", 2),
    ]
    view = trimtab(environment, "top", "--once").stdout
    assert all(part in view for part in ("v2 balanced", "e0", "e1", "ok 2"))

    assert up.end(signal.SIGINT) == 0
    assert up.nothing_is_left()
    assert find_running(tmp_path / "trimtab") == []
    assert list(tmp_path.glob("trimtab-up-*")) == []


def test_what_it_prints_is_enough_to_send_a_request(start_up: StartUp, environment: Mapping[str, str]) -> None:
    up = start_up("--api-key", "client-key")
    (curl,) = (line.strip() for line in up.output().splitlines() if line.strip().startswith("curl "))
    sent = subprocess.run(
        ["bash", "-c", f"{curl} --silent --fail"],
        env={**environment, "TRIMTAB_API_KEY": "client-key"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(sent.stdout)["choices"]
    with pytest.raises(openai.AuthenticationError):
        chat(up.stack, api_key="wrong")
    assert up.end(signal.SIGTERM) == 0
    assert up.nothing_is_left()


def test_an_operator_moves_context_turns_engines_knobs_and_drains_an_engine(
    start_up: StartUp, environment: Mapping[str, str]
) -> None:
    up = start_up()
    token = {"authorization": f"Bearer {up.stack.admin_token}"}
    with httpx.Client(base_url=f"{up.stack.admin_url}/v1", headers=token, timeout=30) as admin:

        def loads(knob: str) -> list[object]:
            return [engine["load"][knob] for engine in admin.get("/engines").json()["engines"]]

        asked = {"source": "e0", "target": "e1", "prompt": list(range(100, 400))}
        first, again = (admin.post("/migrations", json=asked).json() for _ in range(2))
        assert (first["moved_tokens"], first["already_there_tokens"]) == (299, 0)
        assert first["bytes"] > 0
        assert (again["moved_tokens"], again["already_there_tokens"]) == (0, 299)
        assert len(admin.get("/migrations").json()["migrations"]) == 2
        wait_until(lambda: loads("kv_reserved_tokens") == [0, 0], "nothing stays reserved")

        assert trimtab(environment, "plan", "set", "data_parallel", "--chunked-prefill-tokens", "320").returncode == 0
        wait_until(lambda: loads("chunked_prefill_tokens") == [320, 320], "both engines have the knob")

        assert admin.post("/engines/e0/drain").is_success
        wait_until(lambda: loads("draining") == [True, False], "e0 drains")
        assert chat(up.stack)
        assert admin.post("/engines/e0/undrain").is_success
        wait_until(lambda: loads("draining") == [False, False], "e0 takes work again")


def test_a_child_that_dies_is_named_and_started_again(start_up: StartUp) -> None:
    up = start_up("--load", "chat")
    wait_until(lambda: len(records(up.stack)) > 0, "the built-in load is served")
    for pid in up.children:
        if "engines.emulated" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
            break
    wait_until(lambda: "serves again" in up.output(), "the engine is started again")
    assert "engine-e0 ended with signal 9" in up.output()
    assert chat(up.stack)
    up.children = children_of(up.process.pid)
    assert up.end(signal.SIGINT) == 0
    assert up.nothing_is_left()


def test_no_child_shows_a_password_of_redis_in_its_arguments(start_up: StartUp, redis_url: str) -> None:
    address = urlsplit(redis_url)
    with Redis.from_url(redis_url) as client:
        client.acl_setuser(
            "guarded", enabled=True, passwords=["+swordfish"], keys=["*"], channels=["*"], categories=["+@all"]
        )
        try:
            up = start_up("--redis-url", f"redis://guarded:swordfish@{address.netloc}{address.path}", "--load", "chat")
            wait_until(lambda: len(records(up.stack)) > 0, "the password opens Redis")
            children = descendants_of(up.process.pid)
            assert len(children) >= 5
            assert not [pid for pid in children if b"swordfish" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert up.end(signal.SIGINT) == 0
        finally:
            client.acl_deluser("guarded")


def test_everything_dies_with_an_up_that_is_killed(start_up: StartUp) -> None:
    up = start_up()
    up.end(signal.SIGKILL)
    wait_until(up.nothing_is_left, "no child and no port is left")


def test_ctrl_c_while_it_starts_leaves_nothing_either(environment: Mapping[str, str], tmp_path: Path) -> None:
    output = tmp_path / "up.out"
    process = begin_up(environment, output)
    try:
        wait_until(lambda: "Starting" in output.read_text() and len(children_of(process.pid)) == 3, "engines start")
        children = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=STOP_S) == 0
    finally:
        end_hard(process)
    assert "Trimtab is up" not in output.read_text()
    assert not any(runs(child) for child in children)


def test_a_taken_port_is_named_before_anything_starts(environment: Mapping[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = trimtab(environment, "up", "--port", str(port), "--admin-port", "0")
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr
    assert "--port" in refused.stderr
    assert "Starting" not in refused.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--profile", "no-such"), "laptop"),
        (("--api-key", "same", "--admin-token", "same"), "--admin-token"),
        (("--redis-url", "redis://127.0.0.1:1/0"), "--redis-url"),
    ],
)
def test_what_cannot_work_is_a_sentence(environment: Mapping[str, str], flags: tuple[str, ...], says: str) -> None:
    refused = trimtab(environment, "up", "--port", "0", "--admin-port", "0", *flags)
    assert refused.returncode == 1
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
