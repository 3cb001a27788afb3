"""From what became of each request to what a plan is worth."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engines.types import Role
from tuner.plan import Plan
from tuner.slo import Slo, SloTable
from tuner.twin.types import Cause, ClassForecast, Ending, Fleet, Forecast, Timeline
from tuner.workload import Floats, Workload

PERCENTILES = (50.0, 90.0, 99.0)

Flags = NDArray[np.bool_]


def forecast(workload: Workload, timeline: Timeline, slos: SloTable, fleet: Fleet, plan: Plan) -> Forecast:
    """What the plan did to the workload. Requests of classes that `slos` lacks count as its default class.

    Goodput and offered rate are per second of the workload's span; utilisation is per second of the makespan.
    """
    names, slo_of_row = _classes(workload, slos)
    met_ttft, met_tpot = _met(timeline, names, slo_of_row, slos)
    good = met_ttft & met_tpot
    slo_table = [slos.classes[name] for name in names]
    weight = np.array([slo.weight for slo in slo_table])[slo_of_row]
    classes = {name: _class_forecast(timeline, good, slo_of_row == at) for at, name in enumerate(names)}
    return Forecast(
        offered_rps=workload.rate_rps,
        goodput_rps=float(good.sum()) / workload.span_s,
        weighted_goodput=float((good * weight).sum()) / workload.span_s,
        shortfall=_shortfall(classes, slos),
        classes=classes,
        utilisation=_utilisation(timeline, fleet, plan),
        causes=_causes(timeline, met_ttft, met_tpot),
    )


def good_requests(workload: Workload, timeline: Timeline, slos: SloTable) -> Flags:
    """Which requests met both bounds."""
    names, slo_of_row = _classes(workload, slos)
    met_ttft, met_tpot = _met(timeline, names, slo_of_row, slos)
    return met_ttft & met_tpot


def _classes(workload: Workload, slos: SloTable) -> tuple[list[str], NDArray[np.int64]]:
    """The classes that SLOs know, and for each row which of them it is."""
    names = list(slos.classes)
    resolved = np.array([names.index(slos.resolve(name)) for name in workload.classes], dtype=np.int64)
    return names, resolved[workload.slo_class] if len(workload) else np.zeros(0, dtype=np.int64)


def _met(timeline: Timeline, names: list[str], slo_of_row: NDArray[np.int64], slos: SloTable) -> tuple[Flags, Flags]:
    """Whether each request met its TTFT bound, and its TPOT bound. What was not served met neither."""
    table: list[Slo] = [slos.classes[name] for name in names]
    ttft_ms = np.array([slo.ttft_ms for slo in table])[slo_of_row]
    tpot_ms = np.array([slo.tpot_ms for slo in table])[slo_of_row]
    served = timeline.ending == Ending.OK
    met_ttft = served & (timeline.ttft_s * 1e3 <= ttft_ms)
    met_tpot = served & (np.isnan(timeline.tpot_s) | (timeline.tpot_s * 1e3 <= tpot_ms))
    return met_ttft, met_tpot


def _class_forecast(timeline: Timeline, good: Flags, rows: Flags) -> ClassForecast:
    requests = int(rows.sum())
    served = rows & (timeline.ending == Ending.OK)
    return ClassForecast(
        requests=requests,
        attainment=float(good[rows].mean()) if requests else None,
        ttft_s=_percentiles(timeline.ttft_s[served]),
        tpot_s=_percentiles(timeline.tpot_s[served]),
    )


def _percentiles(values: Floats) -> tuple[float, float, float] | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high, highest = np.percentile(known, PERCENTILES)
    return float(low), float(high), float(highest)


def _shortfall(classes: Mapping[str, ClassForecast], slos: SloTable) -> float:
    """Weighted share of all requests that would have had to be good for every class to reach its target."""
    missing = total = 0.0
    for name, found in classes.items():
        slo = slos.classes[name]
        total += slo.weight * found.requests
        if found.attainment is not None:
            missing += slo.weight * found.requests * max(0.0, slo.attainment - found.attainment)
    return missing / total if total else 0.0


def _utilisation(timeline: Timeline, fleet: Fleet, plan: Plan) -> dict[str, float]:
    if timeline.makespan_s <= 0:
        return {}
    roles = [plan.role_of(engine.engine_id) for engine in fleet]
    busy = (timeline.busy_prefill_s + timeline.busy_decode_s) / timeline.makespan_s
    return {role.value: float(busy[[each is role for each in roles]].mean()) for role in Role if role in roles}


def _causes(timeline: Timeline, met_ttft: Flags, met_tpot: Flags) -> dict[Cause, int]:
    """Each violation is put down to one cause; a request that missed both bounds to the one of its TTFT."""
    served = timeline.ending == Ending.OK
    parts = np.stack([timeline.queue_s, timeline.prefill_s, timeline.transfer_s])
    late = served & ~met_ttft
    largest = np.argmax(np.nan_to_num(parts[:, late]), axis=0)
    counts = {
        Cause.QUEUE: int((largest == 0).sum()),
        Cause.PREFILL: int((largest == 1).sum()),
        Cause.TRANSFER: int((largest == 2).sum()),
        Cause.DECODE: int((served & met_ttft & ~met_tpot).sum()),
        Cause.REFUSED: int((~served).sum()),
    }
    return {cause: found for cause, found in counts.items() if found}
