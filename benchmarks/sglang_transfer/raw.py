"""What the machine can do without an engine: NIXL writes and memory copies of as many bytes as some tokens have.

`python -m benchmarks.sglang_transfer.raw LAYERS BYTES_PER_TOKEN_AND_LAYER CAPACITY ROUNDS TOKENS...` in a Python with
NIXL prints `{tokens: {"nixl_s": [...], "copy_s": [...]}}`. The pool is laid out as an engine's: a buffer of keys and
one of values for each layer; one write has one run of consecutive slots in each.
"""

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

ANSWER_S = 120.0
Slabs = list["np.ndarray[Any, np.dtype[np.uint8]]"]


def main(arguments: list[str]) -> None:
    layers, token_bytes, capacity, rounds, *sizes = map(int, arguments)
    buffers, bytes_each = 2 * layers, token_bytes * capacity
    ours, theirs = multiprocessing.Pipe()
    first, last = _two_cores()
    receiving = multiprocessing.Process(target=_receive, args=(theirs, buffers, bytes_each, last), daemon=True)
    receiving.start()
    os.sched_setaffinity(0, {first})
    slabs = [np.ones(bytes_each, np.uint8) for _ in range(buffers)]
    target = [np.ones(bytes_each, np.uint8) for _ in range(buffers)]
    write = _Writer(slabs, ours)
    found = {}
    for tokens in sizes:
        size = tokens * token_bytes
        found[tokens] = {
            "nixl_s": [write.seconds(size) for _ in range(rounds + 1)][1:],
            "copy_s": [_copy_s(slabs, target, size) for _ in range(rounds + 1)][1:],
        }
    ours.send("done")
    receiving.join(ANSWER_S)
    json.dump(found, sys.stdout)


def _two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


def _copy_s(source: Slabs, target: Slabs, size: int) -> float:
    began_s = time.perf_counter()
    for one, other in zip(source, target, strict=True):
        np.copyto(other[:size], one[:size])
    return time.perf_counter() - began_s


class _Writer:
    """Writes the beginning of each of our buffers to the peer's."""

    def __init__(self, slabs: Slabs, peer: Connection) -> None:
        self._agent = _agent("writer")
        self._ours = [(slab.ctypes.data, slab.nbytes, 0, "") for slab in slabs]
        self._agent.register_memory(self._ours, "DRAM")
        if not peer.poll(ANSWER_S):
            raise TimeoutError("the receiving process does not say where its memory is")
        metadata, self._theirs = peer.recv()
        self._name = self._agent.add_remote_agent(metadata)

    def seconds(self, size: int) -> float:
        """One write of `size` bytes in each buffer, from asking to its end."""
        began_s = time.perf_counter()
        source = self._agent.get_xfer_descs([(at, size, 0) for at, *_ in self._ours], "DRAM")
        target = self._agent.get_xfer_descs([(at, size, 0) for at in self._theirs], "DRAM")
        handle = self._agent.initialize_xfer("WRITE", source, target, self._name, b"")
        state = self._agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began_s
        self._agent.release_xfer_handle(handle)
        if state == "ERR":
            raise RuntimeError("NIXL could not write")
        return seconds


def _receive(peer: Connection, buffers: int, bytes_each: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    slabs = [np.ones(bytes_each, np.uint8) for _ in range(buffers)]
    agent = _agent("reader")
    agent.register_memory([(slab.ctypes.data, slab.nbytes, 0, "") for slab in slabs], "DRAM")
    peer.send((agent.get_agent_metadata(), [slab.ctypes.data for slab in slabs]))
    peer.recv()


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


if __name__ == "__main__":
    main(sys.argv[1:])
