"""A slice of a trace at another rate.

As many copies of the slice as the rate asks for lie over each other, each moved by up to `SHIFT_S` so that what is one
clump in the trace is not one huge clump; the last copy is thinned by whole sessions. Copies are other users: they share
nothing with each other. So the rate keeps its course over minutes, and prompts, answers and what sessions share are the
same per engine in fleets of any size.
"""

from dataclasses import replace

import numpy as np

from tuner.workload import Workload, concatenate

BEGIN_S = 1200.0
"""Of the slice within the trace: a third of the way in."""
SHIFT_S = 30.0


def scaled(whole: Workload, span_s: float, rate_rps: float, seed: int) -> Workload:
    """`span_s` seconds of a trace from `BEGIN_S` on, at about `rate_rps`. Raises `ValueError` if there is nothing."""
    rng = np.random.default_rng(seed)
    if not np.any((whole.arrived_s >= BEGIN_S) & (whole.arrived_s < BEGIN_S + span_s)):
        raise ValueError(f"nothing arrives from second {BEGIN_S:g} on")
    own = _slice(whole, BEGIN_S, span_s)
    copies = rate_rps / own.rate_rps
    shifts_s = [0.0, *rng.uniform(-SHIFT_S, SHIFT_S, size=int(np.ceil(copies)) - 1)]
    parts = [_slice(whole, BEGIN_S + shift_s, span_s) for shift_s in shifts_s]
    parts[-1] = _thinned(parts[-1], copies - (len(parts) - 1), rng)
    return _over_each_other(parts)


def _slice(whole: Workload, begin_s: float, span_s: float) -> Workload:
    return whole.since(begin_s).until(span_s)


def _thinned(part: Workload, share: float, rng: np.random.Generator) -> Workload:
    kept = rng.uniform(size=int(part.session.max(initial=0)) + 1) < share
    return part.take(kept[part.session])


def _over_each_other(parts: list[Workload]) -> Workload:
    """All at once; their sessions and roots stay apart."""
    at_s = np.concatenate([each.arrived_s for each in parts])
    order = np.argsort(at_s, kind="stable")
    unordered = replace(concatenate(parts), arrived_s=np.zeros(len(at_s)), span_s=parts[0].span_s)
    return replace(unordered.take(order), arrived_s=at_s[order])
