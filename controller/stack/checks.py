"""What can be known to be wrong with a stack before anything of it is started."""

import contextlib
import socket
from pathlib import Path

from controller.settings import BadSettings
from controller.stack.parts import HOST, StackOptions
from controller.store import StoreUnavailable, open_store
from engines.sglang.launcher import CannotLaunch, find_python


def check(options: StackOptions) -> None:
    """Raises `BadSettings` with a sentence that names the flag to change."""
    if options.model_folder is not None:
        _check_sglang(options.model_folder)
    _check_port("--port", options.port)
    _check_port("--admin-port", options.admin_port)
    if options.port == options.admin_port != 0:
        raise BadSettings(f"--port and --admin-port are both {options.port}: give two different ports")
    if options.api_key is not None and options.api_key == options.admin_token:
        raise BadSettings("--api-key and --admin-token are the same: every client could then change the plan")


def _check_sglang(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise BadSettings(
            f"--model {folder} is not a model folder: prepare one with `trimtab model fetch-small {folder}`"
        )
    try:
        find_python()
    except CannotLaunch as error:
        raise BadSettings(str(error)) from error


def _check_port(flag: str, port: int) -> None:
    with socket.socket() as probe:
        # As servers do; without it a port counts as taken for a minute after its last connection.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            remedy = f"choose another with {flag}, or 0 for any free one"
            raise BadSettings(f"port {port} on {HOST} cannot be had ({error.strerror}): {remedy}") from error


async def check_redis(url: str) -> None:
    """Raises `BadSettings` if no Redis answers there."""
    try:
        async with contextlib.aclosing(open_store(url)) as store:
            await store.ping()
    except (StoreUnavailable, ValueError) as error:
        raise BadSettings(f"--redis-url does not work: {error}. Leave it out to have one started for you") from error
