"""Where a running `trimtab up` can be found: addresses and admin token, readable by its user alone.

One file for each stack, so that two stacks do not overwrite each other. Its owner holds a lock on the file, and the
kernel lets go of the lock however the owner ends; so a file that is not locked is stale, whoever has its pid now.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec


class RunningStack(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody on the same machine needs in order to use and steer a stack."""

    pid: int
    model: str
    url: str
    admin_url: str
    admin_token: str
    redis_url: str
    log_dir: str


def runtime_dir() -> Path:
    """`$XDG_RUNTIME_DIR/trimtab`, or `~/.local/state/trimtab` where there is no such directory."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.access(given, os.W_OK | os.X_OK):
        return Path(given) / "trimtab"
    return Path.home() / ".local" / "state" / "trimtab"


@contextlib.contextmanager
def announced(stack: RunningStack, folder: Path) -> Iterator[Path]:
    """Keep the file of `stack` there while the block runs; raises `OSError` when it cannot be written."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"up-{stack.pid}.json"
    partial = path.with_suffix(".partial")
    with _new_private_file(partial) as file:
        file.write(msgspec.json.encode(stack))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.replace(path)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def find_running(folder: Path) -> Sequence[RunningStack]:
    """Stacks that run now. Files left behind by a stack that was killed are removed."""
    return [stack for path in sorted(folder.glob("up-*.json")) if (stack := _read_or_remove(path)) is not None]


def _new_private_file(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _read_or_remove(path: Path) -> RunningStack | None:
    try:
        with path.open("rb") as file:
            if _is_stale(file):
                path.unlink(missing_ok=True)
                return None
            return msgspec.json.decode(file.read(), type=RunningStack)
    except (OSError, msgspec.DecodeError):
        return None


def _is_stale(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
