"""How a running stack is found."""

import os
import stat
from pathlib import Path

import pytest

from controller.stack.running import RunningStack, announced, find_running


@pytest.fixture
def stack() -> RunningStack:
    return RunningStack(
        pid=os.getpid(),
        model="m",
        url="http://127.0.0.1:1",
        admin_url="http://127.0.0.1:2",
        admin_token="stack-token",
        redis_url="redis://127.0.0.1:3/0",
        log_dir="/nowhere",
    )


def test_the_state_file_is_private_and_goes_with_its_stack(stack: RunningStack, tmp_path: Path) -> None:
    with announced(stack, tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert find_running(tmp_path) == [stack]
    assert not path.exists()


def test_a_file_left_by_a_killed_stack_is_ignored_and_removed(stack: RunningStack, tmp_path: Path) -> None:
    with announced(stack, tmp_path) as path:
        left = path.read_bytes()
    path.write_bytes(left)
    assert find_running(tmp_path) == []
    assert not path.exists()
