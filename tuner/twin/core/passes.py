"""Runs of decode passes: with the same batch they take `first_s`, `first_s + growth_s`, ... seconds."""

import math
from typing import Any

from engines.prefill_rate import MIN_RATED_TOKENS, RATE_SMOOTHING
from tuner.twin.core.address import compiled, nth
from tuner.twin.core.layout import DECODE_PASSES
from tuner.twin.core.timers import set_timer


@compiled
def step_s(engine: Any, batch: int, kv_tokens: int) -> float:
    return float(engine.d + engine.e * batch + engine.f * kv_tokens)


@compiled
def run_s(engine: Any, passes: int) -> float:
    """Seconds that the first `passes` of the run take."""
    return float(passes * engine.first_s + engine.growth_s * (passes * (passes - 1) / 2))


@compiled
def passes_ended(engine: Any, elapsed_s: float) -> int:
    """How many of the run's passes are over after `elapsed_s`."""
    if engine.growth_s <= 0.0:
        count = int(elapsed_s / engine.first_s) if engine.first_s > 0.0 else engine.passes
    else:
        half = engine.growth_s / 2
        linear = engine.first_s - half
        count = int((math.sqrt(linear * linear + 4 * half * elapsed_s) - linear) / (2 * half))
    count = max(0, min(count, engine.passes))
    while count and run_s(engine, count) > elapsed_s:
        count -= 1
    while count < engine.passes and run_s(engine, count + 1) <= elapsed_s:
        count += 1
    return int(count)


@compiled
def begin_run(world: Any, index: int, now_s: float, passes: int) -> None:
    """The room of the first pass is taken already."""
    engine = nth(world.engines, index)
    engine.state = DECODE_PASSES
    engine.since_s = now_s
    engine.passes = passes
    engine.waited_for = engine.waiting + engine.prefilling
    engine.first_s = step_s(engine, engine.running, engine.kv_sum)
    engine.growth_s = engine.f * engine.running
    plan_end(world, index)


@compiled
def plan_end(world: Any, index: int) -> None:
    engine = nth(world.engines, index)
    engine.until_s = engine.since_s + run_s(engine, engine.passes)
    set_timer(world, index, engine.until_s)


@compiled
def count_passes(engine: Any, passes: int) -> None:
    """So many passes of the run are over."""
    spent_s = run_s(engine, passes)
    engine.busy_decode_s += spent_s
    if engine.waiting + engine.prefilling:
        # Nobody leaves the queue during a run. Who joined it during the first pass waits for the others.
        engine.behind_decode_s += spent_s if engine.waited_for else spent_s - engine.first_s
    engine.waited_for = engine.waiting + engine.prefilling
    engine.decodes += passes
    engine.kv_sum += passes * engine.running
    engine.owed = max(0, engine.owed - passes)


@compiled
def count_prefill(engine: Any) -> None:
    """The prefill pass is over. Its rate is learnt as `engines.prefill_rate.PrefillRate` does."""
    engine.busy_prefill_s += engine.prefill_s
    seconds = engine.behind_decode_s + engine.prefill_s
    engine.behind_decode_s = 0.0
    if engine.computing < MIN_RATED_TOKENS or seconds <= 0.0:
        return
    weight = RATE_SMOOTHING if engine.rated_s else 1.0
    engine.rated_tokens += weight * (engine.computing - engine.rated_tokens)
    engine.rated_s += weight * (seconds - engine.rated_s)
