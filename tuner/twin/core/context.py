"""Context caches: what each engine holds of each session and root, what of it is pinned, and which is dropped first.

A stand-in for the radix tree: tokens of a session are cached or not by their number, and a holding that nobody pins
loses its tail first. Holdings of one engine that may be dropped are in a list, least recently used last.
"""

from typing import Any

from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import NONE
from tuner.twin.limits import BLOCK_TOKENS, INDEX_BLOCKS, MAX_BLOCKS


@compiled
def find(world: Any, context: int, engine: int) -> int:
    at = nth(world.holders, context).first
    while at != NONE and nth(world.holdings, at).engine != engine:
        at = nth(world.holdings, at).another
    return int(at)


@compiled
def find_or_make(world: Any, context: int, engine: int, base: int) -> int:
    at = find(world, context, engine)
    if at != NONE:
        return at
    state = world.state
    at = state.holdings
    state.holdings += 1
    holding = nth(world.holdings, at)
    holding.context, holding.engine, holding.base, holding.length = context, engine, base, base
    holding.leaf = base
    holding.hint_age = holding.first_pin = holding.leaf_before = NONE
    holding.another = nth(world.holders, context).first
    nth(world.holders, context).first = at
    return int(at)


@compiled
def cached_tokens(world: Any, request: Any, engine: int, limit: int) -> int:
    """Leading tokens of the prompt's stream that the engine has, up to `limit`."""
    at = find(world, request.session, engine)
    if at != NONE and nth(world.holdings, at).length > nth(world.holdings, at).base:
        return int(min(limit, nth(world.holdings, at).length))
    if request.root == NONE:
        return 0
    at = find(world, request.root, engine)
    return 0 if at == NONE else int(min(limit, nth(world.holdings, at).length, request.root_tokens))


@compiled
def pin(world: Any, number: int, engine: int, length: int) -> None:
    """Have a job keep the first `length` tokens of its context, all of them cached, until `unpin`."""
    job, request = nth(world.jobs, number), nth(world.requests, number >> 1)
    at = find_or_make(world, request.session, engine, request.root_tokens)
    holding = nth(world.holdings, at)
    job.pinned, job.next_pin, job.last_pin = length, holding.first_pin, NONE
    if holding.first_pin != NONE:
        nth(world.jobs, holding.first_pin).last_pin = number
    holding.first_pin = number
    if length > holding.pinned:
        _set_pinned(world, at, length)
    if request.root != NONE:
        _pin_root(world, find_or_make(world, request.root, engine, 0))


@compiled
def unpin(world: Any, number: int, engine: int) -> None:
    job, request = nth(world.jobs, number), nth(world.requests, number >> 1)
    at = find(world, request.session, engine)
    holding = nth(world.holdings, at)
    if job.last_pin == NONE:
        holding.first_pin = job.next_pin
    else:
        nth(world.jobs, job.last_pin).next_pin = job.next_pin
    if job.next_pin != NONE:
        nth(world.jobs, job.next_pin).last_pin = job.last_pin
    if job.pinned == holding.pinned:
        _set_pinned(world, at, _longest_pin(world, holding))
    if request.root != NONE:
        _unpin_root(world, find(world, request.root, engine))


@compiled
def pin_cost(world: Any, request: Any, engine: int, length: int) -> int:
    """Room that is no longer available once that much of the request's context is pinned."""
    cost = 0
    at = find(world, request.session, engine)
    if at != NONE:
        holding = nth(world.holdings, at)
        cost = max(0, length - max(holding.pinned, holding.base))
    if request.root == NONE:
        return int(cost)
    at = find(world, request.root, engine)
    return int(cost if at == NONE or nth(world.holdings, at).pins else cost + nth(world.holdings, at).length)


@compiled
def grow(world: Any, number: int, engine: int, length: int) -> None:
    """The first `length` tokens of a job's context are in the cache from now on, and pinned by it."""
    job, request = nth(world.jobs, number), nth(world.requests, number >> 1)
    where = nth(world.engines, engine)
    if request.root != NONE:
        root = nth(world.holdings, find(world, request.root, engine))
        more = max(0, min(request.root_tokens, length) - root.length)
        root.length += more
        root.pinned = root.length
        root.leaf = 0
        where.used += more
    at = find(world, request.session, engine)
    own = nth(world.holdings, at)
    if length > own.length:
        where.cached += length - own.length
        own.leaf_before, own.leaf, own.length = own.leaf, own.length, length
    job.pinned = length
    if length > own.pinned:
        _set_pinned(world, at, length)


@compiled
def make_room(world: Any, engine: Any) -> None:
    """Drop what was used least recently until nothing is taken that is not there."""
    missing = engine.used + engine.reserved + engine.cached - engine.capacity
    while missing > 0 and engine.lru_last != NONE:
        at = engine.lru_last
        holding = nth(world.holdings, at)
        left = max(holding.pinned, holding.base, _next_end(holding, missing))
        engine.cached -= holding.length - left
        missing -= holding.length - left
        holding.length = left
        if not _loose(holding):
            _unlist(world, engine, at)


@compiled
def note_sent(world: Any, request: Any, engine: int) -> None:
    """The router's prefix index hears that the engine was given this prompt."""
    total = min(request.prompt // BLOCK_TOKENS, MAX_BLOCKS)
    shared = 0
    if request.root != NONE:
        shared = min(request.root_tokens // BLOCK_TOKENS, total)
        _note(world, find_or_make(world, request.root, engine, 0), shared, shared)
    if total > shared:
        _note(world, find_or_make(world, request.session, engine, request.root_tokens), total, total - shared)


@compiled
def show_hints(world: Any, request: Any) -> None:
    """Put what the index knows of the prompt into the views, until `hide_hints`."""
    total = min(request.prompt // BLOCK_TOKENS, MAX_BLOCKS)
    if request.root != NONE:
        _show(world, request.root, min(request.root_tokens // BLOCK_TOKENS, total))
    _show(world, request.session, total)


@compiled
def hide_hints(world: Any, request: Any) -> None:
    _hide(world, request.session)
    if request.root != NONE:
        _hide(world, request.root)


@compiled
def _show(world: Any, context: int, limit: int) -> None:
    age = world.state.index_age
    at = nth(world.holders, context).first
    while at != NONE:
        holding = nth(world.holdings, at)
        if holding.hint_blocks and holding.hint_age >= age - 1:
            view = nth(world.views, holding.engine)
            view.hint = max(view.hint, min(limit, holding.hint_blocks) * BLOCK_TOKENS)
        at = holding.another


@compiled
def _hide(world: Any, context: int) -> None:
    at = nth(world.holders, context).first
    while at != NONE:
        nth(world.views, nth(world.holdings, at).engine).hint = 0
        at = nth(world.holdings, at).another


@compiled
def _note(world: Any, at: int, blocks: int, own_blocks: int) -> None:
    """As in `tuner.prefix.PrefixIndex`, what was not touched while half of the room filled up twice is forgotten."""
    state, holding = world.state, nth(world.holdings, at)
    if holding.hint_age < state.index_age - 1:
        holding.hint_blocks = 0
    state.index_blocks += own_blocks if holding.hint_age < state.index_age else max(0, blocks - holding.hint_blocks)
    holding.hint_blocks = max(holding.hint_blocks, blocks)
    holding.hint_age = state.index_age
    if state.index_blocks > INDEX_BLOCKS // 2:
        state.index_blocks = 0
        state.index_age += 1


@compiled
def _loose(holding: Any) -> int:
    """Tokens that nobody pins."""
    return int(holding.length - max(holding.pinned, holding.base))


@compiled
def _next_end(holding: Any, missing: int) -> int:
    """Where a holding ends after its last leaf; where that begins is only remembered of the last two."""
    if holding.leaf == NONE:
        return int(holding.length - missing)
    end = holding.leaf
    holding.leaf, holding.leaf_before = holding.leaf_before, NONE
    return int(end)


@compiled
def _longest_pin(world: Any, holding: Any) -> int:
    longest = 0
    number = holding.first_pin
    while number != NONE:
        longest = max(longest, nth(world.jobs, number).pinned)
        number = nth(world.jobs, number).next_pin
    return int(longest)


@compiled
def _set_pinned(world: Any, at: int, length: int) -> None:
    """Of a session's holding, the first `length` tokens are pinned now."""
    holding = nth(world.holdings, at)
    before = _loose(holding)
    holding.pinned = length
    _relist(world, at, before)


@compiled
def _pin_root(world: Any, at: int) -> None:
    holding = nth(world.holdings, at)
    holding.pins += 1
    if holding.pins == 1:
        _set_pinned(world, at, holding.length)


@compiled
def _unpin_root(world: Any, at: int) -> None:
    holding = nth(world.holdings, at)
    holding.pins -= 1
    if holding.pins == 0:
        _set_pinned(world, at, 0)


@compiled
def _relist(world: Any, at: int, loose_before: int) -> None:
    """What is loose of a holding has changed: count it, and have it dropped after all others, or not at all."""
    holding = nth(world.holdings, at)
    engine = nth(world.engines, holding.engine)
    loose = _loose(holding)
    engine.used += loose_before - loose
    engine.cached += loose - loose_before
    if holding.listed:
        _unlist(world, engine, at)
    if loose:
        _list(world, engine, at)


@compiled
def _list(world: Any, engine: Any, at: int) -> None:
    """As the most recently used."""
    holding = nth(world.holdings, at)
    holding.listed, holding.newer, holding.older = 1, NONE, engine.lru_first
    if engine.lru_first == NONE:
        engine.lru_last = at
    else:
        nth(world.holdings, engine.lru_first).newer = at
    engine.lru_first = at


@compiled
def _unlist(world: Any, engine: Any, at: int) -> None:
    holding = nth(world.holdings, at)
    holding.listed = 0
    if holding.newer == NONE:
        engine.lru_first = holding.older
    else:
        nth(world.holdings, holding.newer).older = holding.older
    if holding.older == NONE:
        engine.lru_last = holding.newer
    else:
        nth(world.holdings, holding.older).newer = holding.newer
