"""`GET /v1/live`: goodput, demand and attainment of the last minutes, cheap enough to ask for every second.

Requests are judged by the SLOs in force now. They count at the time they ended, demand at arrival.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from controller.admin.figures import Figures, Kept, Rows
from controller.admin.plans import PlanService
from controller.admin.routes import ERRORS
from controller.admin.services import Services
from controller.heartbeats import RouterBeat
from tuner.plan import IssuedBy, Plan
from tuner.slo import Slo, SloTable

STEPS = 60
"""Buckets of every answer."""
SPAN_MIN_S = 60
SPAN_MAX_S = 1800
RECENT_S = 60
REPORTING_S = 1.0
"""Until a request that has ended is known to have ended: the last bucket is at least this old."""

Series = Sequence[float | None]
Floats = NDArray[np.float64]


class Percentiles(BaseModel):
    """Seconds, over requests that were answered."""

    p50: float
    p95: float
    p99: float


class Recent(BaseModel):
    """Sums over the last `recent_s` seconds."""

    offered_rps: float
    finished: int = Field(description="Requests that ended, without those that were wrong or abandoned")
    good: int = Field(description="Of these, met both bounds")
    goodput_rps: float
    attainment: float | None = Field(description="good / finished; null when nothing ended")


class RecentOfClass(Recent):
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None


class LiveSeries(BaseModel):
    """One value a bucket; null where it is not known."""

    offered_rps: Series
    goodput_rps: Series
    attainment: Series = Field(description="Also null where nothing ended")


class LiveClass(BaseModel):
    name: str
    slo: Slo
    recent: RecentOfClass
    series: LiveSeries


class PlanMark(BaseModel):
    """A plan that came into force."""

    version: int
    at_s: float
    issued_by: IssuedBy
    pattern: str
    offload_ratio: float
    reason: str


class Live(BaseModel):
    """The last minutes. Times are Unix seconds."""

    now_s: float
    begin_s: float = Field(description="Start of the first bucket")
    bucket_s: int
    recent_s: int = RECENT_S
    plan_version: int | None = Field(description="In force; null before the first")
    slo_version: int
    inflight: int = Field(description="Requests under way in all routers")
    recent: Recent
    series: LiveSeries
    classes: Sequence[LiveClass] = Field(description="By name")
    plans: Sequence[PlanMark] = Field(description="Oldest first; the first may have been in force before `begin_s`")
    why_empty: str | None = Field(description="Why there is nothing to see; null when there is")


@dataclass(frozen=True, slots=True)
class Window:
    """Buckets of whole seconds, aligned so that one bucket is the same in every answer."""

    begin_s: float
    bucket_s: int

    @classmethod
    def before(cls, now_s: float, span_s: int) -> Self:
        bucket_s = -(-span_s // STEPS)
        end_s = math.floor((now_s - REPORTING_S) / bucket_s) * bucket_s
        return cls(end_s - STEPS * bucket_s, bucket_s)

    def counts(self, at_s: Floats) -> Floats:
        """How many lie in each bucket."""
        end_s = self.begin_s + STEPS * self.bucket_s
        return np.histogram(at_s, STEPS, (self.begin_s, end_s))[0].astype(np.float64)

    def known(self, kept: Kept) -> NDArray[np.bool_]:
        """Buckets of which nothing had to be forgotten."""
        starts_s = self.begin_s + self.bucket_s * np.arange(STEPS)
        return starts_s >= (kept.known_from_s or 0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """Requests of one class, or of all, under the SLOs in force."""

    arrived_s: Floats
    ended: Rows
    good: NDArray[np.bool_]

    def recent(self, now_s: float) -> Recent:
        since_s = now_s - RECENT_S
        ended = self.ended["at_s"] > since_s
        finished, good = int(ended.sum()), int((ended & self.good).sum())
        return Recent(
            offered_rps=float((self.arrived_s > since_s).sum()) / RECENT_S,
            finished=finished,
            good=good,
            goodput_rps=good / RECENT_S,
            attainment=good / finished if finished else None,
        )

    def recent_of_class(self, now_s: float) -> RecentOfClass:
        answered = self.ended[self.ended["answered"] & (self.ended["at_s"] > now_s - RECENT_S)]
        return RecentOfClass(
            **dict(self.recent(now_s)),
            ttft_s=_percentiles(answered["ttft_s"]),
            tpot_s=_percentiles(answered["tpot_s"]),
        )

    def series(self, window: Window, figures: Figures) -> LiveSeries:
        arrived, known = window.counts(self.arrived_s), window.known(figures.finished)
        finished, good = window.counts(self.ended["at_s"]), window.counts(self.ended["at_s"][self.good])
        return LiveSeries(
            offered_rps=_where(window.known(figures.arrived), arrived / window.bucket_s),
            goodput_rps=_where(known, good / window.bucket_s),
            attainment=_where(known & (finished > 0), good / np.maximum(finished, 1)),
        )


def judged(figures: Figures, slos: SloTable) -> Mapping[str, Judged]:
    """Requests by class."""
    return {name: _judged(figures, figures.marks(name, slos), slo) for name, slo in sorted(slos.classes.items())}


def _judged(figures: Figures, marks: NDArray[np.bool_], slo: Slo) -> Judged:
    arrived, ended = figures.arrived.rows, figures.finished.rows
    mine = ended[marks[ended["code"]]]
    return Judged(arrived["at_s"][marks[arrived["code"]]], mine, _good(mine, slo))


def together(classes: Iterable[Judged]) -> Judged:
    """Requests of several classes, each under its own SLO."""
    every = list(classes)
    return Judged(
        np.concatenate([each.arrived_s for each in every]),
        np.concatenate([each.ended for each in every]),
        np.concatenate([each.good for each in every]),
    )


def _good(rows: Rows, slo: Slo) -> NDArray[np.bool_]:
    in_time = rows["ttft_s"] * 1e3 <= slo.ttft_ms
    return np.asarray(rows["answered"] & in_time & ~(rows["tpot_s"] * 1e3 > slo.tpot_ms), dtype=np.bool_)


def _percentiles(values_s: Floats) -> Percentiles | None:
    measured = values_s[~np.isnan(values_s)]
    if not len(measured):
        return None
    p50, p95, p99 = np.percentile(measured, (50, 95, 99), method="inverted_cdf")
    return Percentiles(p50=p50, p95=p95, p99=p99)


def _where(known: NDArray[np.bool_], values: Floats) -> Series:
    return [value if known else None for known, value in zip(known.tolist(), values.tolist(), strict=True)]


class Marks:
    """When plans came into force. Reads the history again only when the plan has changed."""

    def __init__(self, plans: PlanService) -> None:
        self._plans = plans
        self._version: int | None = None
        self._marks: Sequence[PlanMark] = ()

    async def since(self, since_s: float, plan: Plan | None) -> Sequence[PlanMark]:
        """Marks after `since_s`, and the last one before."""
        if plan is not None and plan.version != self._version:
            self._marks = [_mark(each) for each in reversed(await self._plans.history())]
            self._version = plan.version
        later = sum(mark.at_s > since_s for mark in self._marks)
        return self._marks[-(later + 1) :]


def _mark(plan: Plan) -> PlanMark:
    return PlanMark(
        version=plan.version,
        at_s=plan.issued_at_s,
        issued_by=plan.issued_by,
        pattern=plan.pattern,
        offload_ratio=plan.knobs.offload_ratio,
        reason=plan.reason,
    )


class LiveView:
    """Makes answers from services and figures that somebody else owns."""

    def __init__(self, services: Services, figures: Figures, now_s: Callable[[], float]) -> None:
        self._services = services
        self._figures = figures
        self._marks = Marks(services.plans)
        self._now_s = now_s

    async def answer(self, span_s: int) -> Live:
        """The last `span_s` seconds in `STEPS` buckets. Raises `StoreUnavailable`."""
        await self._figures.catch_up()
        slos, plan = await self._services.slos.current(), await self._services.plans.current()
        routers = await self._services.heartbeats.routers()
        now_s = self._now_s()
        window = Window.before(now_s, span_s)
        classes = judged(self._figures, slos)
        every = together(classes.values())
        return Live(
            now_s=now_s,
            begin_s=window.begin_s,
            bucket_s=window.bucket_s,
            plan_version=None if plan is None else plan.version,
            slo_version=slos.version,
            inflight=sum(beat.inflight for beat in routers.values()),
            recent=every.recent(now_s),
            series=every.series(window, self._figures),
            classes=[
                LiveClass(
                    name=name,
                    slo=slos.classes[name],
                    recent=own.recent_of_class(now_s),
                    series=own.series(window, self._figures),
                )
                for name, own in classes.items()
            ],
            plans=await self._marks.since(window.begin_s, plan),
            why_empty=await self._why_empty(every, window, routers),
        )

    async def _why_empty(self, every: Judged, window: Window, routers: Mapping[str, RouterBeat]) -> str | None:
        if (every.ended["at_s"] >= window.begin_s).any():
            return None
        if not routers:
            return "No router is alive: start one with `trimtab up` or `trimtab router`."
        if not await self._services.heartbeats.engines():
            return "No engine is alive, so nothing can be served: start one with `trimtab engine emulated`."
        if (every.arrived_s >= window.begin_s).any():
            return "Requests have arrived, but none has ended yet."
        return f"No request has arrived lately: send one to {next(iter(routers.values())).url}/v1."


def live_routes(services: Services, now_s: Callable[[], float] = time.time) -> APIRouter:
    """Each application follows the streams once, however many watch."""
    view = LiveView(services, Figures(services.store, services.keys, time.monotonic), now_s)
    routes = APIRouter(prefix="/v1", tags=["tuner"], responses=ERRORS)

    @routes.get("/live", summary="Goodput, demand and attainment of the last minutes")
    async def live(
        span_s: Annotated[int, Query(ge=SPAN_MIN_S, le=SPAN_MAX_S, description="How far back, seconds")] = 300,
    ) -> Live:
        return await view.answer(span_s)

    return routes
