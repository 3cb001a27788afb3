"""How far the simulator is from real engines, as tables and goals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from benchmarks.fidelity.telemetry import STAGES, Passes, Stages
from benchmarks.machine import versions
from benchmarks.real_engines import PACKAGES
from benchmarks.report import Report, Section, at_most, number
from benchmarks.short_requests import Traffic
from engines.emulated.profile import Profile
from tuner.slo import Slo
from tuner.twin.forecast import Flags
from tuner.workload import Floats, Workload

GOODPUT_ERROR, TTFT_ERROR, TPOT_ERROR = 0.05, 0.10, 0.10
FIGURES = ("mean", "p50", "p90", "p99")
REDRAWS, REDRAW_SEED = 2000, 1


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What became of each request, in order of arrival; seconds, NaN where there is no such time."""

    complete: Flags
    ttft_s: Floats
    tpot_s: Floats
    good: Flags


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """One pattern. What arrived from `test_from_s` on counts; the fit saw nothing of it."""

    way: str
    workload: Workload
    test_from_s: float
    served: Columns
    simulated: Columns
    served_stages: Stages
    simulated_stages: Stages
    passes: Sequence[Passes]
    profile: Profile
    """As fitted."""

    @property
    def tested(self) -> Flags:
        rows: Flags = self.workload.arrived_s >= self.test_from_s
        return rows

    def goodput_rps(self, columns: Columns) -> float:
        return float(columns.good[self.tested].sum()) / (self.workload.span_s - self.test_from_s)

    @property
    def goodput_error(self) -> float | None:
        """Relative to what was measured; `None` if that was nothing."""
        measured = self.goodput_rps(self.served)
        return abs(self.goodput_rps(self.simulated) - measured) / measured if measured else None

    @property
    def goodput_error_range(self) -> tuple[float, float] | None:
        """Where 95 % of signed errors lie if requests are drawn anew with replacement.

        `None` if no real engine served any in time.
        """
        pair = self.simulated.good[self.tested], self.served.good[self.tested]
        if len(pair[1]) < 2 or not pair[1].any():
            return None
        found = bootstrap(pair, _goodput_errors, n_resamples=REDRAWS, paired=True, method="percentile", rng=REDRAW_SEED)
        return float(found.confidence_interval.low), float(found.confidence_interval.high)

    def figures(self, name: str, columns: Columns) -> Mapping[str, float | None]:
        """Mean and percentiles of `ttft_s` or `tpot_s` over requests that real engines and simulator completed."""
        both = self.tested & self.served.complete & self.simulated.complete
        values = getattr(columns, name)[both]
        known = values[~np.isnan(values)]
        if not len(known):
            return dict.fromkeys(FIGURES)
        p50, p90, p99 = np.percentile(known, (50, 90, 99))
        return {"mean": float(known.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}

    def errors(self, name: str) -> Mapping[str, float | None]:
        """Relative errors of `figures`, signed: above 0 where the simulator is too slow."""
        real, ours = self.figures(name, self.served), self.figures(name, self.simulated)
        return {figure: _error(ours[figure], real[figure]) for figure in FIGURES}


def report(compared: Sequence[Compared], traffic: Traffic, slo: Slo, seed: int, machine: Mapping[str, str]) -> Report:
    goodput = [each.goodput_error for each in compared]
    return Report(
        benchmark="fidelity",
        seed=seed,
        versions=versions(PACKAGES),
        machine=machine,
        results=[_result(each) for each in compared],
        goals=[
            at_most("error of goodput, worst pattern", _worst(goodput), GOODPUT_ERROR),
            at_most("error of P90 TTFT, worst pattern", _worst(_all(compared, "ttft_s", "p90")), TTFT_ERROR),
            at_most("error of mean TPOT, worst pattern", _worst(_all(compared, "tpot_s", "mean")), TPOT_ERROR),
            at_most("error of P90 TPOT, worst pattern", _worst(_all(compared, "tpot_s", "p90")), TPOT_ERROR),
        ],
        headline=_headline(compared),
        sections=[
            _goodput(compared, traffic, slo),
            *(_times(each) for each in compared),
            _stages(compared),
            _passes(compared),
            _fits(compared),
        ],
    )


def _headline(compared: Sequence[Compared]) -> list[str]:
    found = [
        f"{each.way}: goodput {_percent(_error(each.goodput_rps(each.simulated), each.goodput_rps(each.served)))}, "
        f"P90 TTFT {_percent(each.errors('ttft_s')['p90'])}, mean TPOT {_percent(each.errors('tpot_s')['mean'])}"
        for each in compared
    ]
    return [f"Simulator against two real SGLang engines. {'; '.join(found)}"] if found else []


def _goodput(compared: Sequence[Compared], traffic: Traffic, slo: Slo) -> Section:
    rows = [
        [
            each.way,
            str(int(each.tested.sum())),
            number(each.goodput_rps(each.served)),
            number(each.goodput_rps(each.simulated)),
            _percent(_error(each.goodput_rps(each.simulated), each.goodput_rps(each.served))),
            _range(each.goodput_error_range),
            str(int((each.tested & ~each.served.complete).sum())),
        ]
        for each in compared
    ]
    return Section(
        title="Goodput",
        headers=[
            "pattern",
            "requests compared",
            "real good/s",
            "simulated good/s",
            "error",
            "95 % of redraws",
            "failed",
        ],
        rows=rows,
        notes=[
            f"{traffic.name}: {number(traffic.rate_rps)} requests/s, prompts of {traffic.prompt.median:g} tokens and "
            f"answers of {traffic.output.median:g} at the median; bounds TTFT {number(slo.ttft_ms)} ms, "
            f"TPOT {number(slo.tpot_ms)} ms",
            "Latency models are fitted to what engines reported in the first part of each run; requests that arrived "
            "later are compared. Redraws: the same requests drawn anew with replacement, which is what their number "
            "alone leaves open.",
        ],
    )


def _times(each: Compared) -> Section:
    rows = []
    for name, title in (("ttft_s", "TTFT ms"), ("tpot_s", "TPOT ms")):
        real, ours, errors = each.figures(name, each.served), each.figures(name, each.simulated), each.errors(name)
        rows.append([f"{title}, real", *(_ms(real[figure]) for figure in FIGURES)])
        rows.append([f"{title}, simulated", *(_ms(ours[figure]) for figure in FIGURES)])
        rows.append(["error", *(_percent(errors[figure]) for figure in FIGURES)])
    return Section(title=each.way, headers=["", *FIGURES], rows=rows)


def _stages(compared: Sequence[Compared]) -> Section:
    rows = [
        [f"{each.way}, {whose}", *(_ms(stages[stage]) for stage in STAGES)]
        for each in compared
        for whose, stages in (("real", each.served_stages), ("simulated", each.simulated_stages))
    ]
    titles = [stage.removesuffix("_s") for stage in STAGES]
    notes = ["As the router's records have it; what is between the stages is in none of them."]
    return Section(title="Mean time in each stage, ms", headers=["pattern", *titles], rows=rows, notes=notes)


def _passes(compared: Sequence[Compared]) -> Section:
    rows = [
        [
            each.way,
            passes.engine_id,
            passes.sort,
            str(passes.told),
            _ms(passes.real_s),
            _ms(passes.modelled_s),
            _percent(_error(passes.modelled_s, passes.real_s)),
        ]
        for each in compared
        for passes in each.passes
    ]
    return Section(
        title="Mean time of a pass, ms",
        headers=["pattern", "engine", "passes", "told", "real", "modelled", "error"],
        rows=rows,
        notes=[
            "Of the compared part: what the fitted models make of the very work that engines report. An error here is "
            "one of the fit, any other the simulator's.",
        ],
    )


def _fits(compared: Sequence[Compared]) -> Section:
    names = ("a_s", "b_s_per_token", "c_s_per_token2", "d_s", "e_s_per_sequence", "f_s_per_kv_token", "g_s")
    rows = [
        [each.way, *(f"{getattr(each.profile, name) * 1e3:.3g}" for name in names), _mb(each.profile)]
        for each in compared
    ]
    headers = ["pattern", "a", "b a token", "c a token²", "d", "e a sequence", "f a KV token", "g", "MB/s"]
    return Section(title="Fitted coefficients, ms", headers=headers, rows=rows)


def _result(each: Compared) -> dict[str, Any]:
    return {
        "pattern": each.way,
        "requests": int(each.tested.sum()),
        "goodput_rps": each.goodput_rps(each.served),
        "simulated_goodput_rps": each.goodput_rps(each.simulated),
        "goodput_error": each.goodput_error,
        "goodput_error_range": each.goodput_error_range,
        "ttft_s": each.figures("ttft_s", each.served),
        "simulated_ttft_s": each.figures("ttft_s", each.simulated),
        "ttft_errors": each.errors("ttft_s"),
        "tpot_s": each.figures("tpot_s", each.served),
        "simulated_tpot_s": each.figures("tpot_s", each.simulated),
        "tpot_errors": each.errors("tpot_s"),
        "stages": each.served_stages,
        "simulated_stages": each.simulated_stages,
        "passes": [passes._asdict() for passes in each.passes],
    }


def _all(compared: Sequence[Compared], name: str, figure: str) -> list[float | None]:
    return [each.errors(name)[figure] for each in compared]


def _worst(errors: Sequence[float | None]) -> float | None:
    """`None` if any was not measured."""
    known = [abs(error) for error in errors if error is not None]
    return max(known) if known and len(known) == len(errors) else None


def _error(found: float | None, expected: float | None) -> float | None:
    return None if found is None or not expected else (found - expected) / expected


def _goodput_errors(ours: Flags, real: Flags, axis: int) -> Floats:
    """One for each redraw; a redraw without a good request counts as one with a single one."""
    return np.asarray(ours.sum(axis=axis) / np.maximum(1, real.sum(axis=axis)) - 1)


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"


def _range(errors: tuple[float, float] | None) -> str:
    return "–" if errors is None else f"{errors[0]:+.1%} to {errors[1]:+.1%}"


def _ms(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e3)


def _mb(profile: Profile) -> str:
    return number(profile.bandwidth_bytes_per_s / 1e6)
