"""The router: places, admits, lets wait, reserves, has KV sent and answers made. As `reference_router.py`."""

from typing import Any

from tuner.twin.core.address import compiled, nth
from tuner.twin.core.context import hide_hints, note_sent, show_hints, unpin
from tuner.twin.core.layout import ADMIT_QUEUE, NONE
from tuner.twin.core.link import next_landed, start_flow, watch_link
from tuner.twin.core.placing import ADMIT, SHED, best_prefill, next_decode, place, split_end, verdict
from tuner.twin.core.queue import append, leave, next_woken, put_first, wake
from tuner.twin.core.reservations import receive, release_reservation, reserve
from tuner.twin.core.scheduler import catch_up, stir, submit
from tuner.twin.limits import QUEUE

ENDED_OK, ENDED_SHED, ENDED_NO_ROOM = 0, 1, 2


@compiled
def arrive(world: Any, row: int) -> None:
    nth(world.requests, row).turn = row + 1
    attempt(world, row)


@compiled
def attempt(world: Any, row: int) -> None:
    """Place a request that is new or was woken, and let it go on from there."""
    wants_hints = world.plan.hints
    request = nth(world.requests, row)
    if wants_hints:
        show_hints(world, request)
    place(world, row)
    if not request.reserving:
        admit(world, row)
    elif world.plan.admission != ADMIT_QUEUE or verdict(world, row) == ADMIT:
        reserve_somewhere(world, row)
    else:
        wait(world, row)  # others were admitted while this one waited for room
    if wants_hints:
        hide_hints(world, request)


@compiled
def admit(world: Any, row: int) -> None:
    found = verdict(world, row)
    request = nth(world.requests, row)
    if found == SHED:
        end(world, row, ENDED_SHED)
    elif found != ADMIT:
        wait(world, row)
    else:
        request.waited = 0
        start(world, row)


@compiled
def start(world: Any, row: int) -> None:
    state, request = world.state, nth(world.requests, row)
    if state.prefill == NONE:
        generate(world, row, state.first)
        return
    request.reserving = 1
    request.end = split_end(request.prompt, world.plan.offload_ratio)
    reserve_somewhere(world, row)


@compiled
def reserve_somewhere(world: Any, row: int) -> None:
    """Room on the best decode engine that has some; without, back into the queue."""
    now_s, request = world.state.now_s, nth(world.requests, row)
    index = world.state.first
    while index != NONE:
        engine = nth(world.engines, index)
        if engine.own_transfers < world.plan.max_transfers:
            if request.prompt + 1 > engine.limit:
                end(world, row, ENDED_NO_ROOM)
                return
            catch_up(world, index, now_s)
            if reserve(world, index, row, now_s):
                stir_if_busy(world, index, now_s)
                if request.waited:
                    wake(world)
                engine.own_transfers += 1
                engine.own_inflight += 1
                refresh(world, index)
                send(world, row)
                return
        index = next_decode(world, row)
    wait(world, row)


@compiled
def stir_if_busy(world: Any, index: int, now_s: float) -> None:
    """Less room: a run of passes may have to end sooner."""
    if nth(world.engines, index).state:
        stir(world, index, now_s)


@compiled
def send(world: Any, row: int) -> None:
    """Have another engine prefill what the decode engine lacks, unless there is none or nothing is lacking."""
    state, request = world.state, nth(world.requests, row)
    sender = state.prefill
    if sender != NONE and request.decode != state.first:
        sender = best_prefill(world, row, request.decode)
    if sender == NONE or request.begin >= request.end:
        sent(world, row)
        return
    request.prefill = sender
    request.prefill_held = request.end - request.begin
    hold(world, sender, request.prefill_held)
    job = nth(world.jobs, 2 * row + 1)
    job.length, job.max_tokens = request.end, 0
    submit(world, sender, 2 * row + 1, state.now_s)


@compiled
def prefilled(world: Any, row: int) -> None:
    """P is through: the KV goes over D's link."""
    now_s, request, job = world.state.now_s, nth(world.requests, row), nth(world.jobs, 2 * row + 1)
    request.queue += job.admitted_s - job.submitted_s
    request.prefill_time += now_s - job.admitted_s
    request.sent_s = now_s
    request.split = 1
    start_flow(world, row, now_s)
    watch_link(world, request.decode)


@compiled
def landed(world: Any, index: int) -> None:
    """Something may have come over this engine's link."""
    now_s = world.state.now_s
    row = next_landed(world, index, now_s)
    while row != NONE:
        received(world, row)
        row = next_landed(world, index, now_s)
    watch_link(world, index)


@compiled
def received(world: Any, row: int) -> None:
    now_s, request = world.state.now_s, nth(world.requests, row)
    request.transfer = now_s - request.sent_s
    catch_up(world, request.decode, now_s)
    receive(world, row, now_s)
    catch_up(world, request.prefill, now_s)
    unpin(world, 2 * row + 1, request.prefill)
    release(world, request.prefill, request.prefill_held)
    note_if_wanted(world, row, request.prefill)
    stir(world, request.prefill, now_s)
    sent(world, row)


@compiled
def sent(world: Any, row: int) -> None:
    request = nth(world.requests, row)
    engine = nth(world.engines, request.decode)
    engine.own_transfers -= 1
    engine.own_inflight -= 1
    refresh(world, request.decode)
    wake(world)
    generate(world, row, request.decode)


@compiled
def generate(world: Any, row: int, index: int) -> None:
    now_s, request = world.state.now_s, nth(world.requests, row)
    request.decode = index
    note_if_wanted(world, row, index)
    request.decode_pending = max(1, request.prompt - request.end)
    request.decode_held = 1
    hold(world, index, request.decode_pending)
    if request.prompt + request.output > nth(world.engines, index).limit:
        catch_up(world, index, now_s)
        release_reservation(world, row)
        stir(world, index, now_s)
        end(world, row, ENDED_NO_ROOM)
        return
    request.claimed = request.reserved
    job = nth(world.jobs, 2 * row)
    job.length, job.max_tokens = request.prompt, request.output
    submit(world, index, 2 * row, now_s)


@compiled
def tell(world: Any, number: int) -> None:
    """A job got its first token, was prefilled, or is through."""
    now_s, row = world.state.now_s, number >> 1
    job, request = nth(world.jobs, number), nth(world.requests, row)
    if number & 1:
        prefilled(world, row)
        return
    if not request.started:
        request.started = 1
        request.first_s = now_s
        engine = nth(world.engines, request.decode)
        engine.own_pending -= request.decode_pending
        request.decode_pending = 0
        refresh(world, request.decode)
    if job.outputs >= job.max_tokens:
        finished(world, row)


@compiled
def finished(world: Any, row: int) -> None:
    now_s, request, job = world.state.now_s, nth(world.requests, row), nth(world.jobs, 2 * row)
    prefill_s = request.first_s - job.admitted_s
    request.queue += job.admitted_s - job.submitted_s
    request.prefill_time += prefill_s
    request.decode_time = now_s - request.first_s
    request.cached = job.matched
    end(world, row, ENDED_OK)


@compiled
def end(world: Any, row: int, ending: int) -> None:
    state, request = world.state, nth(world.requests, row)
    request.ended, request.ending = 1, ending
    request.e2e = state.now_s - request.arrived_s
    if request.decode_held:
        request.decode_held = 0
        release(world, request.decode, request.decode_pending)
    state.ended += 1
    state.makespan_s = state.now_s
    wake(world)


# what the router counts


@compiled
def hold(world: Any, index: int, prefill_tokens: int) -> None:
    engine, view = nth(world.engines, index), nth(world.views, index)
    engine.own_inflight += 1
    engine.own_pending += prefill_tokens
    view.kv_free = max(0, view.kv_free - prefill_tokens)
    refresh(world, index)


@compiled
def release(world: Any, index: int, prefill_tokens: int) -> None:
    engine = nth(world.engines, index)
    engine.own_inflight -= 1
    engine.own_pending -= prefill_tokens
    refresh(world, index)


@compiled
def refresh(world: Any, index: int) -> None:
    engine, view = nth(world.engines, index), nth(world.views, index)
    before = view.inflight
    view.inflight = max(engine.own_inflight, engine.reported_inflight)
    if view.role != world.state.not_decoding:
        world.state.inflight += view.inflight - before
    view.pending = max(engine.own_pending, engine.reported_pending)


@compiled
def poll(world: Any, index: int) -> None:
    """The router asks for the load."""
    engine = nth(world.engines, index)
    catch_up(world, index, world.state.now_s)
    engine.reported_inflight = engine.running + engine.prefilling + engine.waiting
    engine.reported_pending = engine.waiting_tokens + engine.prefilling_tokens
    nth(world.views, index).kv_free = max(0, engine.capacity - engine.used - engine.reserved)
    tell_rate(world, index)
    refresh(world, index)
    wake(world)


@compiled
def tell_rate(world: Any, index: int) -> None:
    engine, view = nth(world.engines, index), nth(world.views, index)
    if engine.rated_s == 0.0:
        return
    if view.rate == 0.0 and view.role != world.state.not_prefilling:
        world.state.unrated -= 1
    view.rate = engine.rated_tokens / engine.rated_s


@compiled
def note_if_wanted(world: Any, row: int, index: int) -> None:
    if world.plan.hints:
        note_sent(world, nth(world.requests, row), index)


# waiting


@compiled
def wait(world: Any, row: int) -> None:
    state, request = world.state, nth(world.requests, row)
    if state.queued >= QUEUE and not request.waited:
        end(world, row, ENDED_NO_ROOM)
        return
    request.waits, request.waits_since_s = 1, state.now_s
    if request.waited:
        put_first(world, row)
    else:
        append(world, row)


@compiled
def stop_waiting(world: Any, row: int) -> None:
    request = nth(world.requests, row)
    request.queue += world.state.now_s - request.waits_since_s
    request.waits = 0


@compiled
def settle(world: Any) -> None:
    """Let those try who were woken by what just happened."""
    row = next_woken(world)
    while row != NONE:
        stop_waiting(world, row)
        nth(world.requests, row).waited = 1
        attempt(world, row)
        row = next_woken(world)


@compiled
def give_up(world: Any, row: int) -> None:
    """It has waited for as long as it may."""
    stop_waiting(world, row)
    leave(world, row)
    end(world, row, ENDED_NO_ROOM)
