"""Run a program that dies with its parent: `python tether.py PARENT_PID PROGRAM ARG...`.

A parent that is killed with SIGKILL cannot stop its children. On Linux the kernel can: PR_SET_PDEATHSIG is set here,
between fork and the program, and survives the exec. This is a program of its own rather than a `preexec_fn`, which
may deadlock when the parent has threads. It is run by path with `-I -S`, so it must import nothing but the standard
library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, program: list[str]) -> None:
    """Becomes `program`; returns only by raising `OSError` if it cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above; then no signal will ever come.
    if os.getppid() == parent_pid:
        os.execvp(program[0], program)  # noqa: S606 — the point is to become the program, with no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
