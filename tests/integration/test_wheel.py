"""A wheel built from the checkout, installed into an empty virtual environment, runs `trimtab up`."""

import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.support.up import Up, end_hard, environment_of, until_announced

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "controller", "dashboards", "engines", "tuner")
UV = Path(sys.executable).with_name("uv")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what a build leaves in its folder would get into the next wheel."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / file, source)
    run(UV, "build", "--quiet", "--wheel", "--out-dir", source / "dist", source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `trimtab` of an environment that holds the wheel and what the lock says."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    run(UV, "venv", "--quiet", "--python", sys.executable, venv)
    lock = CHECKOUT / "requirements" / "base.lock"
    run(UV, "pip", "install", "--quiet", "--python", venv / "bin" / "python", "-r", lock, wheel)
    return venv / "bin" / "trimtab"


def run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_brings_every_file_that_is_read_at_run_time(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    folders = ("controller/console/static", "engines/emulated/profiles", "engines/emulated/tokenizer")
    files = [file for folder in folders for file in (CHECKOUT / folder).rglob("*") if file.is_file()]
    assert files
    assert [file for file in files if str(file.relative_to(CHECKOUT)) not in packed] == []


def test_the_installed_command_brings_up_a_stack_that_answers(installed: Path, tmp_path: Path) -> None:
    output = tmp_path / "up.out"
    # Nothing is compiled in there yet: what the first process compiles, the others need not.
    environment = {name: value for name, value in environment_of(tmp_path).items() if name != "PYTHONDONTWRITEBYTECODE"}
    with output.open("w") as out:
        process = subprocess.Popen(
            [installed, "up", "--engines", "1", "--port", "0", "--admin-port", "0"],
            cwd=tmp_path, env=environment, stdout=out, stderr=out, text=True,
        )  # fmt: skip
    try:
        up = Up(process, until_announced(process, tmp_path / "trimtab", output), output)
        body = {"model": up.stack.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{up.stack.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"]
        assert httpx.get(f"{up.stack.admin_url}/console/", timeout=60).status_code == 200
        assert up.end(signal.SIGINT) == 0
    finally:
        end_hard(process)
