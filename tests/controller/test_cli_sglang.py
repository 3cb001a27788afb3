"""`trimtab engine sglang`, `trimtab model` and `trimtab up --engine sglang`, as far as they need no SGLang."""

import subprocess
import sys
from pathlib import Path

import pytest

from engines.sglang.launcher import PYTHON_VARIABLE

FAKE = """#!/bin/sh
# Says which packages are missing, or becomes the engine: prints its environment and its arguments.
case "$*" in
  *cpu.absent*) echo '["triton"]' ;;
  *) echo "$@"; env | sort; cat /proc/self/status | grep Cpus_allowed_list ;;
esac
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(FAKE)
    path.chmod(0o755)
    return path


def trimtab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "controller.cli", *arguments]
    kept = {"PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=kept | environment)


def test_the_engine_becomes_sglang_with_its_flags_its_core_and_its_settings(fake_python):
    ran = trimtab(
        *("engine", "sglang", "--model", "m", "--device", "cpu", "--cores", "0", "--engine-id", "e7"),
        *("--port", "5", "--tp-size", "1", "--page-size=16"),
        **{PYTHON_VARIABLE: str(fake_python), "TRIMTAB_SGLANG_REDIS_URL": "redis://there"},
    )
    assert ran.returncode == 0, ran.stderr
    first, *rest = ran.stdout.splitlines()
    assert first.startswith("-m engines.sglang.server --model-path m --host 127.0.0.1 --port 5 --device cpu")
    assert first.endswith("--tp-size 1 --page-size=16")
    for line in ("TRIMTAB_SGLANG_ENGINE_ID=e7", "TRIMTAB_SGLANG_REDIS_URL=redis://there", "TORCHDYNAMO_DISABLE=1"):
        assert line in rest
    assert [line for line in rest if line.startswith("Cpus_allowed_list")] == ["Cpus_allowed_list:\t0"]


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["engine", "sglang", "--model", "m"], {PYTHON_VARIABLE: "/nowhere"}, "cannot be run"),
        (["engine", "sglang", "--model", "m", "--cores", "x"], {}, "not a list of cores"),
        (["model", "fetch-small", "there"], {PYTHON_VARIABLE: "/nowhere"}, "cannot be run"),
        (["up", "--engine", "sglang", "--model", "nothing-here"], {}, "trimtab model fetch-small"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(arguments, environment, says):
    ran = trimtab(*arguments, **environment)
    assert ran.returncode == 1
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
