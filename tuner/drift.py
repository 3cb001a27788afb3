"""Has the traffic moved? A change point in the demand since the last one, told apart from noise.

The recent past, looked at over several lengths, is compared with all that came before it in the same regime: the rate,
the means of log prompt and log output, and the class mix, each against the spread that it shows from one moment to the
next, so that bursts are not taken for shifts. A move must be both beyond noise and large enough to matter.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tuner.workload import Floats, Workload

RECENT_S = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Lengths of the recent past: short ones see a jump at once, long ones see small or slow moves."""

ALARM_Z = 5.0
"""Standard errors. Four lengths of four features are tested each tick, so this is far out."""

LEAST_MOVE = 0.2
"""Of a mean logarithm, about 20 %; smaller moves seldom change which plan is best."""

BURST_S = 20.0
LEAST_BURST = 0.4
"""Of the rate over less than `BURST_S`: every traffic has moments that are a third busier."""

LEAST_SHARE = 0.1
"""Of a class among all requests."""

LOOK_BACK_S = 90.0
"""Before the recent past in which a shift shows: how far back it may have begun."""

LEAST_REQUESTS = 20
COUNT_S = 2.0
"""Bins in which arrivals are counted."""

FEW_COUNTS = 30
"""Bins below which the spread of the counts is itself badly known: bursts may not have shown themselves yet."""

NO_ARRIVALS_RATE = 1e-3
LEAST_VARIANCE = 1e-4
"""Traffic may have one length only."""


class Drift(NamedTuple):
    """The traffic moved at `since_s` of the workload's time."""

    since_s: float
    moved: Sequence[str]


def detect(workload: Workload, regime_s: float) -> Drift | None:
    """A shift within `workload.arrived_s >= regime_s`, if there is one; the end of the window is now."""
    for recent_s in RECENT_S:
        begin_s = workload.span_s - recent_s
        if begin_s - regime_s < 2 * COUNT_S:
            break
        moved = [name for name, z in _moves(workload, regime_s, begin_s) if abs(z) > ALARM_Z]
        if moved:
            return Drift(change_point(workload, max(regime_s, begin_s - LOOK_BACK_S)), moved)
    return None


def _moves(workload: Workload, regime_s: float, begin_s: float) -> Iterator[tuple[str, float]]:
    """Feature → standard errors between before and after `begin_s`; moves too small to matter count as none."""
    yield "rate", _rate_z(workload, regime_s, begin_s)
    before = (workload.arrived_s >= regime_s) & (workload.arrived_s < begin_s)
    after = workload.arrived_s >= begin_s
    if min(before.sum(), after.sum()) < LEAST_REQUESTS:
        return
    arrived_s = workload.arrived_s[before]
    for name, values, least in _features(workload):
        yield name, _mean_z(values[before], arrived_s, (regime_s, begin_s), values[after], least)


def _features(workload: Workload) -> Iterator[tuple[str, Floats, float]]:
    """Name, value of each request, and the least move of the mean that matters."""
    yield "prompt_tokens", np.log1p(workload.prompt_tokens), LEAST_MOVE
    yield "output_tokens", np.log1p(workload.output_tokens), LEAST_MOVE
    if len(workload.classes) > 1:
        for index, name in enumerate(workload.classes):
            yield f"class {name}", (workload.slo_class == index).astype(np.float64), LEAST_SHARE


def _mean_z(before: Floats, arrived_s: Floats, span: tuple[float, float], after: Floats, least: float) -> float:
    """How far two means are apart, in standard errors.

    Like requests come in clusters, so the error is taken from sums over bins of time, not from single requests: the
    variance of a ratio estimator, with the correlation from bin to bin.
    """
    mean = float(before.mean())
    move = float(after.mean()) - mean
    if abs(move) < least:
        return 0.0
    bins = max(1, int((span[1] - span[0]) / COUNT_S))
    sums, _ = np.histogram(arrived_s, bins=bins, range=span, weights=before - mean)
    clustered = float(sums.var()) * bins / len(before) * (1 + _memory(sums))
    variance = max(clustered, float(before.var()), float(after.var()), LEAST_VARIANCE)
    return move / float(np.sqrt(_doubt(bins) * variance * (1 / len(before) + 1 / len(after))))


def _rate_z(workload: Workload, regime_s: float, begin_s: float) -> float:
    """How far the arrivals in a bin's time are apart, in standard errors."""
    before, recent_bins = _counts(workload, regime_s, begin_s), (workload.span_s - begin_s) / COUNT_S
    old, new = float(before.mean()), float((workload.arrived_s >= begin_s).sum()) / recent_bins
    floor = NO_ARRIVALS_RATE * COUNT_S
    least = LEAST_MOVE if workload.span_s - begin_s >= BURST_S else LEAST_BURST
    if abs(np.log(max(new, floor) / max(old, floor))) < least:
        return 0.0
    dispersion = max(1.0, float(before.var()) / max(old, floor)) * (1 + _memory(before))
    error = _doubt(len(before)) * dispersion * max(old, floor) * (1 / len(before) + 1 / recent_bins)
    return (new - old) / float(np.sqrt(error))


def _doubt(bins: int) -> float:
    """By how much a variance that was seen over few bins may be too small."""
    return 1 + FEW_COUNTS / bins


def _memory(counts: Floats) -> float:
    """How much longer bursts are than a bin: sums of correlated counts vary more than independent ones."""
    if len(counts) < 10 or counts.var() == 0:
        return 0.0
    centred = counts - counts.mean()
    lags = [float((centred[lag:] * centred[:-lag]).mean() / counts.var()) for lag in range(1, min(8, len(counts) // 3))]
    return 2 * sum(max(0.0, each) for each in lags)


def _counts(workload: Workload, begin_s: float, end_s: float) -> Floats:
    """Arrivals in whole bins, the last of which ends at `end_s`."""
    bins = int((end_s - begin_s) / COUNT_S)
    counts, _ = np.histogram(workload.arrived_s, bins=bins, range=(end_s - bins * COUNT_S, end_s))
    return counts.astype(np.float64)


def change_point(workload: Workload, earliest_s: float) -> float:
    """Where splitting the recent past in two explains it best: the split with the largest likelihood ratio.

    Normal for the logarithms of lengths, Poisson for the counts.
    """
    at = np.arange(earliest_s, workload.span_s - COUNT_S / 2, COUNT_S / 2)
    gains = [_split_gain(workload, earliest_s, split_s) for split_s in at]
    return float(at[int(np.argmax(gains))])


def _split_gain(workload: Workload, begin_s: float, split_s: float) -> float:
    recent = workload.arrived_s >= begin_s
    left = recent & (workload.arrived_s < split_s)
    right = workload.arrived_s >= split_s
    gain = _poisson_gain(int(left.sum()), split_s - begin_s, int(right.sum()), workload.span_s - split_s)
    for values in (workload.prompt_tokens, workload.output_tokens):
        logs = np.log1p(values)
        gain += _normal_gain(logs[recent], logs[left], logs[right])
    return gain


def _poisson_gain(left: int, left_s: float, right: int, right_s: float) -> float:
    def fit(count: int, span_s: float) -> float:
        return count * float(np.log(max(count, 0.5) / max(span_s, 1e-9)))

    return fit(left, left_s) + fit(right, right_s) - fit(left + right, left_s + right_s)


def _normal_gain(whole: Floats, left: Floats, right: Floats) -> float:
    if min(len(left), len(right)) < 2:
        return 0.0
    within = (len(left) * left.var() + len(right) * right.var()) / len(whole)
    floor = 1e-6
    return 0.5 * len(whole) * float(np.log((whole.var() + floor) / (within + floor)))
