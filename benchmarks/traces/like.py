"""Load with a trace's statistics: its rate over time and clumps, its lengths, and its sessions with their root.

What a trace's statistics do not hold is not there either: lengths know nothing of each other nor of the time, and
neither does the number of a session's requests.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.adapt.generate import Column, arrivals, lengths
from benchmarks.adapt.scenarios import Empirical, Gamma
from benchmarks.traces.read import in_order
from benchmarks.traces.statistics import BIN_S, Statistics
from tuner.workload import Floats, Ints, Workload


def like(statistics: Statistics, seed: int) -> Workload:
    """As long as the trace, at its own pace. The same seed gives the same requests."""
    rng = np.random.default_rng(seed)
    began_s = _beginnings(statistics, rng)
    turns = _turns(statistics.turns, len(began_s), rng)
    session = np.repeat(np.arange(len(turns)), turns)
    first = np.repeat(np.cumsum(turns) - turns, turns)
    first_tokens = _tokens(statistics.first_tokens, len(turns), rng)
    made = in_order(
        at_s=began_s[session] + _since_first(_pauses(statistics.pauses_s, len(session), rng), first),
        prompt=first_tokens[session] + _since_first(_tokens(statistics.added_tokens, len(session), rng), first),
        output=_tokens(statistics.output_tokens, len(session), rng),
        session=session,
        root_tokens=statistics.root_tokens,
    )
    return made.until(statistics.span_s)


def _beginnings(statistics: Statistics, rng: np.random.Generator) -> Floats:
    """When sessions begin: clumps at a rate of one a second, then stretched to the rate that each bin has."""
    expected = np.concatenate([[0.0], np.cumsum(statistics.sessions_per_bin, dtype=float)])
    times = arrivals(Gamma(cv=statistics.cv), 1.0, float(expected[-1]), rng)
    found: Floats = np.interp(times, expected, BIN_S * np.arange(len(expected)))
    return found


def _turns(shares: Sequence[float], count: int, rng: np.random.Generator) -> Ints:
    """Of each session."""
    likely = np.asarray(shares, dtype=float)
    found: Ints = 1 + rng.choice(len(likely), size=count, p=likely / likely.sum()).astype(np.int64)
    return found


def _pauses(quantiles: Sequence[float], count: int, rng: np.random.Generator) -> Floats:
    """Seconds; none of them matters if there are no quantiles, for then no session goes on."""
    known = quantiles or [0.0]
    found: Floats = np.interp(rng.uniform(size=count), np.linspace(0, 1, len(known)), known)
    return found


def _tokens(quantiles: Sequence[float], count: int, rng: np.random.Generator) -> Ints:
    """As for `_pauses`."""
    return lengths(Empirical(quantiles=[round(each) for each in quantiles or [1.0]]), count, rng)


def _since_first(values: Column, first: Ints) -> Column:
    """Sums from the second row of each session up to and with each row; `first` is the row at which it starts."""
    sums = np.cumsum(values)
    return sums - sums[first]
