"""Processes that end with the one that started them, however that ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """A parent that is killed cannot stop its workers; on Linux the kernel can. Call it first in a new process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above; then no signal will ever come.
    if os.getppid() != parent_pid:
        sys.exit(1)
