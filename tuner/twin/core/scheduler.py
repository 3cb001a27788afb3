"""Continuous batching as in `engines.emulated.scheduler`, but whole runs of equal decode passes at a time."""

from typing import Any

from engines.emulated.scheduler import DECODE_HEADROOM_TOKENS
from tuner.twin.core.address import compiled, nth
from tuner.twin.core.context import cached_tokens, grow, make_room, pin, pin_cost, unpin
from tuner.twin.core.heap import JOB_BITS, heap_of, job_of, pop, push, take_out
from tuner.twin.core.layout import DECODE_PASSES, IDLE, NONE, PREFILL_PASS
from tuner.twin.core.passes import begin_run, count_passes, count_prefill, passes_ended, plan_end, run_s, step_s
from tuner.twin.core.reservations import release_reservation, release_youngest_claimed
from tuner.twin.core.timers import set_timer

FAR = 1 << 40


@compiled
def available(engine: Any) -> int:
    return int(engine.capacity - engine.used - engine.reserved)


@compiled
def submit(world: Any, index: int, number: int, now_s: float) -> None:
    """Queue a job. Its `length` and `max_tokens` are set, all else is not."""
    engine, job, state = nth(world.engines, index), nth(world.jobs, number), world.state
    catch_up(world, index, now_s)
    state.orders += 1
    job.order = state.orders
    job.submitted_s = now_s
    job.expected = job.length - cached_tokens(world, nth(world.requests, number >> 1), index, job.length - 1)
    job.following = NONE
    if engine.waiting_last == NONE:
        engine.waiting_first = number
    else:
        nth(world.jobs, engine.waiting_last).following = number
    engine.waiting_last = number
    engine.waiting += 1
    engine.waiting_tokens += job.expected
    stir(world, index, now_s)


@compiled
def catch_up(world: Any, index: int, now_s: float) -> None:
    """Count the decode passes that are over by now, so that the run begins with the one under way."""
    engine = nth(world.engines, index)
    if engine.state != DECODE_PASSES:
        return
    ended = min(passes_ended(engine, now_s - engine.since_s), engine.passes - 1)
    if ended == 0:
        return
    spent_s = run_s(engine, ended)
    count_passes(engine, ended)
    engine.used += ended * engine.running
    make_room(world, engine)
    engine.since_s += spent_s
    engine.first_s += ended * engine.growth_s
    engine.passes -= ended


@compiled
def stir(world: Any, index: int, now_s: float) -> None:
    """Something changed for an engine that is caught up: begin a pass, or end the run of passes in time for it."""
    engine = nth(world.engines, index)
    if engine.state == IDLE:
        begin_pass(world, index, now_s)
    elif engine.state == DECODE_PASSES:
        passes = engine.passes
        if engine.waiting or engine.prefilling:
            passes = min(passes, max(1, engine.owed))
        passes = min(passes, 1 + max(0, available(engine)) // engine.running)
        if passes < engine.passes:
            engine.passes = passes
            plan_end(world, index)


@compiled
def begin_pass(world: Any, index: int, now_s: float) -> None:
    engine = nth(world.engines, index)
    engine.state = IDLE
    new, context = 0, 0
    if (engine.prefilling or engine.waiting) and (not engine.running or engine.owed <= 0):
        new, context = next_chunks(world, index, now_s)
    batch = 0
    if engine.mixed or not new:
        batch = decode_batch(world, index)
    if not new and not batch:
        while engine.waiting and not new:
            new, context = next_chunks(world, index, now_s)
            if not new and not release_youngest_claimed(world, index):
                break
    if new:
        begin_prefill(world, index, now_s, new, context, batch)
    elif batch:
        begin_run(world, index, now_s, run_length(engine, heap_of(world, index)))
    else:
        set_timer(world, index, float("inf"))


@compiled
def begin_prefill(world: Any, index: int, now_s: float, new: int, context: int, batch: int) -> None:
    engine = nth(world.engines, index)
    duration_s = engine.a + engine.b * new + engine.c * context
    if batch:
        duration_s += step_s(engine, batch, engine.kv_sum) - engine.d
    engine.state = PREFILL_PASS
    engine.batch = batch
    engine.computing = new
    engine.owed = engine.interval
    engine.since_s = now_s
    engine.prefill_s = duration_s
    engine.until_s = now_s + duration_s
    set_timer(world, index, engine.until_s)


@compiled
def run_length(engine: Any, heap: Any) -> int:
    """Decode passes until a request is through, prefill has its turn or room runs out; the first has its room."""
    passes = (nth(heap, 0).entry >> JOB_BITS) - engine.decodes
    if engine.owed > 0 and (engine.waiting or engine.prefilling):
        passes = min(passes, engine.owed)
    return int(min(passes, 1 + available(engine) // engine.running))


@compiled
def next_chunks(world: Any, index: int, now_s: float) -> tuple[int, int]:
    """Fill the token budget: new tokens in this pass, and the sum that their attention costs."""
    engine = nth(world.engines, index)
    budget = engine.chunk
    new, context = 0, 0
    number = engine.prefilling_first
    while number != NONE:
        job = nth(world.jobs, number)
        job.chunk = min(budget, job.length - job.computed)
        budget -= job.chunk
        new += job.chunk
        context += job.chunk * (2 * job.computed + job.chunk)
        number = job.following
    while budget > 0 and engine.waiting and admit_first(world, index, now_s):
        job = nth(world.jobs, engine.prefilling_last)
        job.chunk = min(budget, job.length - job.computed)
        budget -= job.chunk
        new += job.chunk
        context += job.chunk * (2 * job.computed + job.chunk)
    return new, context // 2


@compiled
def admit_first(world: Any, index: int, now_s: float) -> bool:
    """Give the head of the queue the room for its whole uncached prompt, if that leaves the others theirs."""
    engine = nth(world.engines, index)
    number = engine.waiting_first
    job, request = nth(world.jobs, number), nth(world.requests, number >> 1)
    admitted = engine.running + engine.prefilling
    if admitted >= engine.max_running:
        return False
    matched = cached_tokens(world, request, index, job.length - 1)
    needed = job.length - matched
    claimed = request.reserved and request.claimed and not number & 1
    room = available(engine) - pin_cost(world, request, index, matched) + (request.reserved_tokens if claimed else 0)
    own = min(DECODE_HEADROOM_TOKENS, max(0, job.max_tokens - job.outputs - 1))
    if room < needed + own + DECODE_HEADROOM_TOKENS * admitted:
        return False
    if claimed:
        release_reservation(world, number >> 1)
    pin(world, number, index, matched)
    engine.used += needed
    make_room(world, engine)
    begin_prefilling(world, index, number, matched, now_s)
    return True


@compiled
def begin_prefilling(world: Any, index: int, number: int, matched: int, now_s: float) -> None:
    """Move the head of the queue to those that prefill."""
    engine, job = nth(world.engines, index), nth(world.jobs, number)
    engine.waiting_first = job.following
    if engine.waiting_first == NONE:
        engine.waiting_last = NONE
    engine.waiting -= 1
    engine.waiting_tokens -= job.expected
    job.following = NONE
    append_prefilling(world, engine, number)
    engine.prefilling_tokens += job.length - matched
    job.computed = matched
    if not job.admitted:
        job.admitted = 1
        job.admitted_s, job.matched = now_s, matched


@compiled
def append_prefilling(world: Any, engine: Any, number: int) -> None:
    if engine.prefilling_last == NONE:
        engine.prefilling_first = number
    else:
        nth(world.jobs, engine.prefilling_last).following = number
    engine.prefilling_last = number
    engine.prefilling += 1


@compiled
def decode_batch(world: Any, index: int) -> int:
    """Take room for one more token of each running request, retracting the youngest while there is too little."""
    engine = nth(world.engines, index)
    while engine.running and available(engine) < engine.running:
        retract(world, index)
    engine.used += engine.running
    make_room(world, engine)
    return int(engine.running)


@compiled
def order_of(world: Any, entry: int) -> int:
    return int(nth(world.jobs, job_of(entry)).order)


@compiled
def retract(world: Any, index: int) -> None:
    """The youngest goes back to the head of the queue; its KV stays cached as long as nobody needs the room."""
    engine, heap = nth(world.engines, index), heap_of(world, index)
    youngest = 0
    for at in range(engine.running):
        if order_of(world, nth(heap, at).entry) > order_of(world, nth(heap, youngest).entry):
            youngest = at
    entry = take_out(heap, engine.running, youngest)
    number = job_of(entry)
    job, request = nth(world.jobs, number), nth(world.requests, number >> 1)
    outputs = job.max_tokens - ((entry >> JOB_BITS) - engine.decodes)
    engine.running -= 1
    engine.kv_sum -= request.prompt + outputs
    engine.retracted += 1
    keep(world, index, number, request.prompt + outputs - 1)
    job.outputs = outputs
    job.length = request.prompt + outputs
    job.computed = 0
    job.expected = job.length - cached_tokens(world, request, index, job.length - 1)
    job.following = engine.waiting_first
    engine.waiting_first = number
    if engine.waiting_last == NONE:
        engine.waiting_last = number
    engine.waiting += 1
    engine.waiting_tokens += job.expected


@compiled
def keep(world: Any, index: int, number: int, kv_tokens: int) -> None:
    """A running request leaves all it computed in the cache, and lets go of it."""
    engine = nth(world.engines, index)
    engine.used -= kv_tokens - nth(world.jobs, number).length
    grow(world, number, index, kv_tokens)
    make_room(world, engine)
    unpin(world, number, index)


@compiled
def end_pass(world: Any, index: int, now_s: float) -> None:
    """Puts into the list of what is to be told: jobs that got their first token, were prefilled, or are through."""
    engine = nth(world.engines, index)
    if engine.state == DECODE_PASSES:
        engine.used += (engine.passes - 1) * engine.running
        make_room(world, engine)
        count_passes(engine, engine.passes)
        end_decodes(world, index)
        return
    count_prefill(engine)
    if engine.batch:
        engine.decodes += 1
        engine.kv_sum += engine.running
        end_decodes(world, index)
    end_chunks(world, index)


@compiled
def end_decodes(world: Any, index: int) -> None:
    """Let go of the requests that are through."""
    engine, heap = nth(world.engines, index), heap_of(world, index)
    while engine.running and nth(heap, 0).entry >> JOB_BITS <= engine.decodes:
        number = job_of(pop(heap, engine.running))
        engine.running -= 1
        complete(world, index, number)
        tell_in_turn(world, number)


@compiled
def complete(world: Any, index: int, number: int) -> None:
    """For one that counts as running no longer, but is still in `kv_sum`."""
    engine, job, request = nth(world.engines, index), nth(world.jobs, number), nth(world.requests, number >> 1)
    engine.kv_sum -= request.prompt + job.max_tokens
    keep(world, index, number, request.prompt + job.max_tokens - 1)
    job.outputs = job.max_tokens


@compiled
def end_chunks(world: Any, index: int) -> None:
    engine = nth(world.engines, index)
    number, engine.prefilling_first, engine.prefilling_last = engine.prefilling_first, NONE, NONE
    engine.prefilling = 0
    while number != NONE:
        job = nth(world.jobs, number)
        following = job.following
        job.following = NONE
        end_chunk(world, index, number)
        if job.computed < job.length:
            append_prefilling(world, engine, number)
        else:
            end_prefill(world, index, number)
            tell_later(world, number)
        number = following


@compiled
def end_chunk(world: Any, index: int, number: int) -> None:
    """Let other requests share what is computed so far."""
    engine, job = nth(world.engines, index), nth(world.jobs, number)
    job.computed += job.chunk
    engine.prefilling_tokens -= job.chunk
    engine.used -= job.chunk
    grow(world, number, index, job.computed)


@compiled
def end_prefill(world: Any, index: int, number: int) -> None:
    """The whole prompt is there; a generation gets its first token."""
    if number & 1:
        return
    engine, state = nth(world.engines, index), world.state
    job, request = nth(world.jobs, number), nth(world.requests, number >> 1)
    job.outputs += 1
    engine.kv_sum += request.prompt + job.outputs
    if job.outputs >= job.max_tokens:
        complete(world, index, number)
        return
    target = engine.decodes + job.max_tokens - job.outputs
    state.orders += 1
    job.started = state.orders
    push(heap_of(world, index), engine.running, target << JOB_BITS | number)
    engine.running += 1


@compiled
def tell_later(world: Any, number: int) -> None:
    """To the router, once the engine's next pass has begun."""
    state = world.state
    nth(world.jobs, number).next_told = NONE
    if state.told_last == NONE:
        state.told_first = number
    else:
        nth(world.jobs, state.told_last).next_told = number
    state.told_last = number


@compiled
def tell_in_turn(world: Any, number: int) -> None:
    """Those that are through after one pass are told in the order in which they began to decode."""
    state, started = world.state, nth(world.jobs, number).started
    if state.told_last == NONE or nth(world.jobs, state.told_last).started < started:
        tell_later(world, number)
        return
    before, after = NONE, state.told_first
    while nth(world.jobs, after).started < started:
        before, after = after, nth(world.jobs, after).next_told
    nth(world.jobs, number).next_told = after
    if before == NONE:
        state.told_first = number
    else:
        nth(world.jobs, before).next_told = number


@compiled
def next_told(world: Any) -> int:
    """Take the next job that is to be told; `NONE` if there is none."""
    state, number = world.state, world.state.told_first
    if number != NONE:
        state.told_first = nth(world.jobs, number).next_told
        if state.told_first == NONE:
            state.told_last = NONE
    return int(number)
