"""The README's quick start, word for word."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.stack.running import find_running
from tests.support.up import (
    STOP_S,
    Up,
    descendants_of,
    end_hard,
    environment_of,
    listens,
    records,
    runs,
    until_announced,
    wait_until,
)

CHECKOUT = Path(__file__).parents[2]
VENV = os.path.relpath(sys.prefix, CHECKOUT)
"""`.venv` when the tests are run as the README says."""
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT_PORTS = (8080, 8081)


def snippets() -> dict[str, str]:
    """The blocks of the quick start that a newcomer runs, by what they do."""
    section = (CHECKOUT / "README.md").read_text().split("## Quick start\n")[1].split("\n## ")[0]
    blocks = FENCED.findall(section)
    assert [language for language, _ in blocks] == ["bash", "python", "bash", "bash"]
    start, client, change, watch = (text.strip() for _, text in blocks)
    return {"start": start, "client": client, "change": change, "watch": watch}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """What the first block starts; on other ports where those of the README are taken."""
    output = tmp_path / "up.out"
    assert snippets()["start"] == "make up"
    # `-o` leaves out the installation: the other tests run from the same virtual environment now.
    command = ["make", "-o", f"{VENV}/.base", f"VENV={VENV}", "up"]
    if any(listens(port) for port in DEFAULT_PORTS):
        command.append("ARGS=--port 0 --admin-port 0")
    with output.open("w") as out:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment_of(tmp_path), stdout=out, stderr=out, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Up(process, until_announced(process, tmp_path / "trimtab", output), output)
    finally:
        end_hard(process)


def ask(client: str, up: Up, tmp_path: Path) -> str:
    """Run the Python block; what it printed."""
    script = tmp_path / "client.py"
    script.write_text(client.replace("http://127.0.0.1:8080", up.stack.url))
    return shell(f"{sys.executable} {script}", tmp_path)


def shell(line: str, tmp_path: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", line.replace(".venv/bin", f"{VENV}/bin")],
        cwd=CHECKOUT, env=environment_of(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quick_start_of_the_readme_does_what_it_says(up: Up, tmp_path: Path) -> None:
    block = snippets()
    assert block["change"] == ".venv/bin/trimtab plan set balanced --offload-ratio 0.1"
    assert ask(block["client"], up, tmp_path).strip()
    wait_until(lambda: len(records(up.stack)) == 1, "the first record is there")
    assert "version 2" in shell(block["change"], tmp_path)
    assert ask(block["client"], up, tmp_path).strip()
    wait_until(lambda: len(records(up.stack)) == 2, "the second record is there")
    assert [(record.pattern, record.plan_version, record.outcome) for record in records(up.stack)] == [
        ("data_parallel", 1, "ok"),
        ("balanced", 2, "ok"),
    ]
    assert "v2 balanced" in shell(f"{block['watch']} --once", tmp_path)

    up.children = descendants_of(up.process.pid)
    assert len(up.children) >= 7
    os.killpg(up.process.pid, signal.SIGINT)
    up.process.wait(timeout=STOP_S)
    assert up.nothing_is_left()
    assert not any(runs(pid) for pid in up.children)
    assert find_running(tmp_path / "trimtab") == []
    assert list(tmp_path.glob("trimtab-up-*")) == []
