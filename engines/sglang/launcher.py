"""Starting SGLang with the plugin: which Python, which environment, which flags. Runs in any Python.

`start` replaces this process by SGLang's, so whoever started it owns the engine itself: its signals and its end.
SGLang's own flags pass through; only those that a CPU needs and that were not given are added.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from engines.sglang.cpu import defaults

PYTHON_VARIABLE = "TRIMTAB_SGLANG_PYTHON"
"""Names the Python that has SGLang, where that is not the one that runs this."""
STAND_INS = Path(__file__).parent / "cpu" / "stand_ins"
PROBE_S = 120.0
HOST = "127.0.0.1"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class CannotLaunch(Exception):
    """A sentence that says what is missing and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """One engine. What is `None` is left to SGLang or to the plugin."""

    model: str
    """A model folder, or a name that SGLang can download."""
    device: str | None = None
    host: str = HOST
    port: int = 0
    """0 takes a free one."""
    cores: frozenset[int] | None = None
    """CPU cores that the engine may use; `None` leaves it where it is."""
    plugins: str | None = None
    """Which plugins SGLang loads, separated by commas; `None` loads all that are installed."""
    ready_file: Path | None = None
    """Written with the address, as JSON, once the engine serves."""
    plugin_settings: Mapping[str, str] | None = None
    """Environment of the plugin (`engines.sglang.settings`)."""
    flags: Sequence[str] = ()
    """SGLang's own flags, as they are."""


def start(options: LaunchOptions) -> NoReturn:
    """Become SGLang. Raises `CannotLaunch` before anything has changed, `OSError` if a core does not exist."""
    python = find_python()
    stand_ins = _missing_packages(python) if options.device == "cpu" else ()
    environment = {**os.environ, **environment_of(options, stand_ins)}
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    os.execve(python, list(command(python, options)), environment)  # noqa: S606  no shell is what is wanted


def find_python() -> Path:
    """The Python that has SGLang: the one that `TRIMTAB_SGLANG_PYTHON` names, else this one."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named is not None:
        # Not resolved: a virtual environment is found by the path of its link.
        python = Path(named).absolute()
        if not os.access(python, os.X_OK):
            raise CannotLaunch(f"{PYTHON_VARIABLE} is {named}, which cannot be run")
        return python
    if find_spec("sglang") is None:
        raise CannotLaunch(
            f"SGLang is not installed for {sys.executable}: set {PYTHON_VARIABLE} to a Python that has it, "
            "for example after `make sglang` to .venv-sglang/bin/python"
        )
    return Path(sys.executable)


def command(python: Path, options: LaunchOptions) -> Sequence[str]:
    """The whole command line of the engine."""
    given = {flag.partition("=")[0] for flag in options.flags}
    own = {
        "--model-path": options.model,
        "--host": options.host,
        "--port": str(options.port or free_port(options.host)),
        "--device": options.device,
    }
    own_flags = [part for name, value in own.items() if value is not None for part in (name, value)]
    # Clients of OpenAI's API expect to be told what was cached; SGLang keeps it to itself unless asked.
    more = () if "--enable-cache-report" in given else ("--enable-cache-report",)
    of_cpu = defaults.flags(given) if options.device == "cpu" else ()
    ready = [] if options.ready_file is None else ["--ready-file", str(options.ready_file.absolute())]
    return [str(python), "-m", "engines.sglang.server", *ready, *own_flags, *more, *of_cpu, *options.flags]


def environment_of(options: LaunchOptions, stand_ins: Collection[str]) -> Mapping[str, str]:
    """Additions to the environment. `stand_ins`: packages that the engine's Python lacks."""
    found: dict[str, str] = {**(options.plugin_settings or {})}
    # Without this a checkout in the working directory hides the installed plugin from SGLang.
    found["PYTHONSAFEPATH"] = "1"
    if options.plugins is not None:
        found["SGLANG_PLUGINS"] = options.plugins
    if Path(options.model).is_dir():
        found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if options.host in LOOPBACK and "UCX_NET_DEVICES" not in os.environ:
        # Whoever serves on loopback is reached on loopback: transfers need not look at other networks.
        found["UCX_NET_DEVICES"] = "lo"
    if options.device == "cpu":
        found |= defaults.environment(stand_ins, [str(STAND_INS / name) for name in stand_ins])
    return found


def new_engine_id() -> str:
    return f"sglang-{secrets.token_hex(3)}"


def free_port(host: str) -> int:
    """A TCP port of `host` that nothing listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _missing_packages(python: Path) -> Sequence[str]:
    probe = [str(python), "-P", "-m", "engines.sglang.cpu.absent"]
    try:
        answer = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise CannotLaunch(f"{python} did not say within {PROBE_S:g} s which packages it has") from error
    if answer.returncode != 0:
        raise CannotLaunch(f"trimtab is not installed for {python}: {answer.stderr.strip()[-500:]}")
    names: list[str] = json.loads(answer.stdout)
    return names
