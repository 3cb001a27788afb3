"""Room on a decode engine for KV that is on its way. A request has at most one reservation."""

from typing import Any

from engines.emulated.scheduler import DECODE_HEADROOM_TOKENS
from tuner.twin.core.address import compiled, nth
from tuner.twin.core.context import cached_tokens, grow, make_room, pin, pin_cost, unpin
from tuner.twin.core.layout import NONE
from tuner.twin.limits import RESERVATION_TTL_S


@compiled
def reserve(world: Any, index: int, row: int, now_s: float) -> bool:
    """Room for the prompt up to `end` at an engine that is caught up, if there is enough; sets `begin`."""
    engine, request = nth(world.engines, index), nth(world.requests, row)
    matched = cached_tokens(world, request, index, request.end)
    needed = request.end - matched
    others = engine.running + engine.prefilling + engine.reservations
    spare = request.prompt - request.end + DECODE_HEADROOM_TOKENS * others
    room = engine.capacity - engine.used - engine.reserved - pin_cost(world, request, index, matched)
    if room < needed + spare:
        return False
    pin(world, 2 * row, index, matched)
    engine.reserved += needed
    make_room(world, engine)
    request.begin, request.reserved, request.reserved_tokens, request.claimed = matched, 1, needed, 0
    request.decode = index
    request.expires_s = now_s + RESERVATION_TTL_S
    request.older, request.newer = engine.reservation_last, NONE
    if engine.reservation_last != NONE:
        nth(world.requests, engine.reservation_last).newer = row
    engine.reservation_last = row
    engine.reservations += 1
    return True


@compiled
def receive(world: Any, row: int, now_s: float) -> None:
    """The KV has arrived; one that comes too late changes nothing."""
    request = nth(world.requests, row)
    if now_s >= request.expires_s:
        release_reservation(world, row)
        return
    engine = nth(world.engines, request.decode)
    engine.reserved -= request.reserved_tokens
    request.reserved_tokens = 0
    grow(world, 2 * row, request.decode, request.end)


@compiled
def release_reservation(world: Any, row: int) -> None:
    request = nth(world.requests, row)
    if not request.reserved:
        return
    engine = nth(world.engines, request.decode)
    engine.reserved -= request.reserved_tokens
    request.reserved = request.reserved_tokens = 0
    unpin(world, 2 * row, request.decode)
    if request.older != NONE:
        nth(world.requests, request.older).newer = request.newer
    if request.newer != NONE:
        nth(world.requests, request.newer).older = request.older
    else:
        engine.reservation_last = request.older
    engine.reservations -= 1


@compiled
def release_youngest_claimed(world: Any, index: int) -> bool:
    """Take room back from a generation that still waits; it then computes for itself."""
    row = nth(world.engines, index).reservation_last
    while row != NONE:
        if nth(world.requests, row).claimed:
            release_reservation(world, row)
            return True
        row = nth(world.requests, row).older
    return False
