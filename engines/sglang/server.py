"""`python -m engines.sglang.server [--ready-file FILE] SGLANG-FLAGS…`: SGLang's server that says when it serves.

Runs in the Python that has SGLang; `engines.sglang.launcher` builds its command line and environment.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib import import_module
from pathlib import Path

POLL_S = 0.5
ASK_S = 5.0
PR_SET_PDEATHSIG = 1
INIT_PID = 1
SERVER_PID_VARIABLE = "TRIMTAB_SGLANG_SERVER_PID"
"""Tells SGLang's processes who serves: process 1 of a container, or one whose orphans process 1 adopts."""


def main(arguments: list[str]) -> None:
    """Serve until a signal; SGLang decides what that does."""
    ready_file, flags = _split(arguments)
    _check_plugin(os.environ.get("SGLANG_PLUGINS", ""))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    os.environ[SERVER_PID_VARIABLE] = str(os.getpid())
    load_plugins()
    server_args = prepare_server_args(flags)
    if ready_file is not None:
        url = f"http://{server_args.host}:{server_args.port}"
        threading.Thread(target=_say_when_ready, args=(url, ready_file), daemon=True).start()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _check_plugin(wanted: str) -> None:
    """SGLang only logs a plugin that does not import and serves without it, which nobody would notice here."""
    if not wanted or "trimtab" in wanted.split(","):
        import_module("engines.sglang.plugin")


def _split(arguments: list[str]) -> tuple[Path | None, list[str]]:
    if arguments[:1] == ["--ready-file"]:
        return Path(arguments[1]), arguments[2:]
    return None, arguments


def _say_when_ready(url: str, ready_file: Path) -> None:
    while not _is_healthy(url):
        time.sleep(POLL_S)
    draft = ready_file.with_name(ready_file.name + ".draft")
    draft.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    # Readers see the whole file or none.
    draft.replace(ready_file)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=ASK_S) as answer:  # noqa: S310  our own address
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _die_with_parent() -> None:
    """SGLang's processes see to this themselves, but only once they have started up, half a minute later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above; then no signal will ever come.
    if os.getppid() == INIT_PID and os.environ.get(SERVER_PID_VARIABLE) != str(INIT_PID):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__mp_main__":
    # A process that SGLang spawns imports this module before anything else.
    _die_with_parent()

if __name__ == "__main__":
    main(sys.argv[1:])
