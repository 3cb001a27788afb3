"""What clients got of the requests that arrived in an interval.

Whether a request counts must not depend on how it fares, or what ends soon would weigh too much. So the interval stops
early enough for nearly all requests in it to have had the whole time that their SLO allows, and of those that still
have not ended, the ones that cannot meet it any more count as missed.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from engines.records import Outcome
from tuner.blame import NOT_COUNTED, Cause
from tuner.bounds import bounds_s
from tuner.cleaning import CAUSES
from tuner.imputing import highest_outputs
from tuner.rows import OK, OPEN, OUTCOMES, VOID, Rows
from tuner.slo import SloTable
from tuner.types import Measured
from tuner.workload import Floats

ENOUGH_S, ENOUGH_REQUESTS = 30.0, 100
"""An interval that has both is not made longer: what a plan does now counts, not what it did on average."""
LEAST_REQUESTS = 20
LEAST_SETTLED = 0.8
"""Share of the interval's requests whose fate must be known."""
ALLOWED_SHARE = 0.95
"""Of requests that must have had all the time their SLO allows."""
REPORTING_S = 1.0
"""Until a request that has ended is known to have ended."""

_LEFT_OUT = [OUTCOMES.index(outcome) for outcome in Outcome if outcome in NOT_COUNTED]


def measure(rows: Rows, classes: tuple[str, ...], slos: SloTable, since_s: float, now_s: float) -> Measured | None:
    """The latest of `rows`, which arrived from `since_s` on, in order; `None` while too few of them are settled."""
    rows = rows[~rows["warming"] & (rows["ending"] != VOID) & ~np.isin(rows["ending"], _LEFT_OUT)]
    if not len(rows):
        return None
    ttft_s, tpot_s = bounds_s(slos, classes, rows["slo_class"])
    allowed_s = ttft_s + tpot_s * np.maximum(0.0, highest_outputs(rows) - 1) + REPORTING_S
    until_s = now_s - min(float(np.quantile(allowed_s, ALLOWED_SHARE)), (now_s - since_s) / 2)
    since_s = max(since_s, _enough_since_s(rows, until_s))
    inside = (rows["arrived_s"] >= since_s) & (rows["arrived_s"] < until_s)
    rows, ttft_s, tpot_s, allowed_s = rows[inside], ttft_s[inside], tpot_s[inside], allowed_s[inside]
    settled = (rows["ending"] != OPEN) | (now_s - rows["arrived_s"] > allowed_s)
    if settled.sum() < max(LEAST_REQUESTS, LEAST_SETTLED * len(rows)):
        return None
    offered_rps = len(rows) / (until_s - since_s)
    named = np.array([slos.resolve(name) for name in classes])[rows["slo_class"]]
    return _measured(rows[settled], named[settled], ttft_s[settled], tpot_s[settled], until_s - since_s, offered_rps)


def _enough_since_s(rows: Rows, until_s: float) -> float:
    """From when on there is enough before `until_s`."""
    before = rows["arrived_s"][rows["arrived_s"] < until_s]
    return min(until_s - ENOUGH_S, float(before[-ENOUGH_REQUESTS:].min(initial=until_s)))


def _measured(
    rows: Rows, classes: NDArray[np.str_], ttft_s: Floats, tpot_s: Floats, span_s: float, offered_rps: float
) -> Measured:
    in_time = rows["ttft_s"] <= ttft_s
    steady = ~(rows["tpot_s"] > tpot_s)
    good = (rows["ending"] == OK) & in_time & steady
    versions = np.unique(rows["plan_version"])
    return Measured(
        span_s=span_s,
        requests=len(rows),
        offered_rps=offered_rps,
        goodput_rps=float(good.mean()) * offered_rps,
        attainment={str(name): float(good[classes == name].mean()) for name in np.unique(classes)},
        causes=_causes(rows[~good], in_time[~good]),
        plan_version=int(versions[0]) if len(versions) == 1 else None,
    )


def _causes(missed: Rows, in_time: NDArray[np.bool_]) -> dict[Cause, int]:
    """Each miss is put down to one cause; that of its TTFT if it missed both. Overdue requests must still be queued."""
    causes = np.where((missed["ending"] == OK) & in_time, missed["tpot_cause"], missed["ttft_cause"])
    counts = Counter(CAUSES[index] for index in causes[missed["ending"] != OPEN])
    counts[Cause.QUEUE] += int((missed["ending"] == OPEN).sum())
    return {cause: count for cause in Cause if (count := counts[cause])}
