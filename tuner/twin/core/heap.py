"""Binary heaps of integers, smallest first: per engine, when each of its running jobs is through.

An entry is a count of decode passes and, in its low bits, a job: when the engine has done so many, the job is through.
"""

from typing import Any

from tuner.twin.core.address import compiled, nth

JOB_BITS = 27


@compiled
def heap_of(world: Any, index: int) -> Any:
    return nth(world.heaps, index * world.state.heap_size)


@compiled
def job_of(entry: int) -> int:
    return entry & ((1 << JOB_BITS) - 1)


@compiled
def push(heap: Any, size: int, entry: int) -> None:
    """`size` is how many are in it before."""
    rise(heap, size, entry)


@compiled
def pop(heap: Any, size: int) -> int:
    """Take the smallest out; `size` is how many are in it before."""
    return take_out(heap, size, 0)


@compiled
def take_out(heap: Any, size: int, at: int) -> int:
    """Take out what is at a place."""
    taken, last = nth(heap, at).entry, nth(heap, size - 1).entry
    if at < size - 1:
        rise(heap, sink(heap, size - 1, at, last), last)
    return int(taken)


@compiled
def rise(heap: Any, at: int, entry: int) -> None:
    while at and nth(heap, (at - 1) // 2).entry > entry:
        nth(heap, at).entry = nth(heap, (at - 1) // 2).entry
        at = (at - 1) // 2
    nth(heap, at).entry = entry


@compiled
def sink(heap: Any, size: int, at: int, entry: int) -> int:
    """Where `entry` may go, at or below `at`."""
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and nth(heap, child + 1).entry < nth(heap, child).entry:
            child += 1
        if nth(heap, child).entry >= entry:
            break
        nth(heap, at).entry = nth(heap, child).entry
        at = child
    return int(at)
