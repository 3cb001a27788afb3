"""Sockets whose reads say when the kernel had the bytes.

Load and backend share a core and run in Python, so when they come round to reading says more about them than about the
proxy. The kernel notes the arrival of every segment; that is the time used for all latencies. Clock: Unix time, ns.
"""

import socket
import struct
import time

# Linux's number for it on 64-bit machines; the socket module does not name it.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("qq")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)
READ_BYTES = 32 * 1024


def prepare(sock: socket.socket) -> None:
    """Non-blocking, without Nagle's algorithm, with times of arrival."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def receive(sock: socket.socket) -> tuple[bytes, int]:
    """What can be read now and when its last segment arrived; no bytes at the end. Raises `BlockingIOError`."""
    data, ancillary, _, _ = sock.recvmsg(READ_BYTES, ANCILLARY_BYTES)
    if not ancillary:
        return data, time.time_ns()
    seconds, nanoseconds = TIMESPEC.unpack(ancillary[0][2])
    return data, seconds * 1_000_000_000 + nanoseconds
