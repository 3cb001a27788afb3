"""Goodput by phase, policy beside policy, and the goals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.live.load import Seen
from benchmarks.adapt.outcome import Flags
from benchmarks.machine import versions
from benchmarks.real_engines import PACKAGES
from benchmarks.report import Goal, Report, Section, at_least, number
from benchmarks.short_requests import Traffic
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, Plan
from tuner.slo import DEFAULT_CLASS, SloTable
from tuner.workload import Workload

PEERS = {"sglang-router, round robin": "round_robin", "sglang-router, cache aware": "cache_aware"}
STATIC = (DATA_PARALLEL, DISAGGREGATED, BALANCED)
SETTLED_S = 60.0
"""Of a phase, after which Trimtab must be where the better static pattern is."""
BETTER, NEAR = 1.0, 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One policy on the requests of one seed."""

    policy: str
    seed: int
    parts: Sequence[Workload]
    good: Flags
    seen: Seen
    begun_s: float
    """Unix time of the first second."""
    plans: Sequence[Plan]
    """Issued while it ran."""

    def phase(self, at: int, since_s: float = 0.0) -> float:
        """Good requests a second among those that arrived in a phase, or after so much of it."""
        part, begin = self.parts[at], sum(len(each) for each in self.parts[:at])
        good = self.good[begin : begin + len(part)]
        return float(good[part.arrived_s >= since_s].sum()) / (part.span_s - since_s)

    @property
    def whole(self) -> float:
        return float(self.good.sum()) / sum(part.span_s for part in self.parts)


def report(
    runs: Sequence[Run],
    traffic: Sequence[Traffic],
    slos: SloTable,
    phase_s: float,
    seeds: Sequence[int],
    machine: Mapping[str, str],
    skipped: Mapping[str, str],
) -> Report:
    return Report(
        benchmark="adapt --sglang",
        seed=seeds[0],
        versions=versions(PACKAGES),
        machine=machine,
        results=[_result(run) for run in runs],
        goals=goals(runs, phase_s),
        skipped=skipped,
        headline=_headline(runs),
        sections=[_overview(runs, traffic, slos, phase_s), _by_seed(runs, traffic), *_plans(runs)],
    )


def goals(runs: Sequence[Run], phase_s: float) -> list[Goal]:
    """Over the mean of seeds. What was not run is not measured."""
    phases = range(len(runs[0].parts)) if runs else range(0)
    peers = [_over(runs, PEERS, at) for at in phases]
    settled = [_over(runs, STATIC, at, SETTLED_S) if phase_s > SETTLED_S else None for at in phases]
    return [
        at_least("goodput of the best static pattern's, whole run", _over(runs, STATIC), BETTER),
        at_least("goodput of the better peer's, worse phase", _least(peers), BETTER),
        at_least("goodput of the better static's after a phase's first minute, worse phase", _least(settled), NEAR),
    ]


def _goodput(runs: Sequence[Run], policy: str, phase: int | None = None, since_s: float = 0.0) -> float | None:
    """Good requests a second, mean of seeds: of the whole, or of a phase after so much of it."""
    own = [run.whole if phase is None else run.phase(phase, since_s) for run in runs if run.policy == policy]
    return mean(own) if own else None


def _over(runs: Sequence[Run], others: Iterable[str], phase: int | None = None, since_s: float = 0.0) -> float | None:
    """Trimtab's goodput relative to the best of others."""
    ours = _goodput(runs, TRIMTAB, phase, since_s)
    known = [found for other in others if (found := _goodput(runs, other, phase, since_s)) is not None]
    best = max(known, default=None)
    return None if ours is None or not best else ours / best


def _least(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known) if known and len(known) == len(ratios) else None


def _headline(runs: Sequence[Run]) -> list[str]:
    figures = [f"{policy} {number(_goodput(runs, policy))}" for policy in _policies(runs)]
    return [f"Two real SGLang engines, good requests/s through two phases: {', '.join(figures)}"] if figures else []


def _overview(runs: Sequence[Run], traffic: Sequence[Traffic], slos: SloTable, phase_s: float) -> Section:
    slo = slos.classes[DEFAULT_CLASS]
    rows = [
        [
            policy,
            *(number(_goodput(runs, policy, at)) for at in range(len(traffic))),
            *(
                number(_goodput(runs, policy, at, SETTLED_S)) if phase_s > SETTLED_S else "–"
                for at in range(len(traffic))
            ),
            number(_goodput(runs, policy)),
            f"{np.mean([run.good.mean() for run in runs if run.policy == policy]):.1%}",
        ]
        for policy in _policies(runs)
    ]
    asked = [
        f"{each.name}: {number(each.rate_rps)} requests/s, prompts of {each.prompt.median:g} tokens and answers of "
        f"{each.output.median:g} at the median"
        for each in traffic
    ]
    names = [each.name for each in traffic]
    return Section(
        title="Goodput, mean of seeds",
        headers=["policy", *names, *(f"{name} after {SETTLED_S:g} s" for name in names), "whole", "attainment"],
        rows=rows,
        notes=[*asked, f"{phase_s:g} s of each; bounds TTFT {number(slo.ttft_ms)} ms, TPOT {number(slo.tpot_ms)} ms"],
    )


def _by_seed(runs: Sequence[Run], traffic: Sequence[Traffic]) -> Section:
    rows = [
        [
            run.policy,
            str(run.seed),
            *(number(run.phase(at)) for at in range(len(traffic))),
            number(run.whole),
            *(number(value) for value in _middle(run)),
            str(int((~run.seen.complete).sum())),
            str(len(run.plans)),
        ]
        for run in runs
    ]
    times = ["TTFT s P50", "P90", "TPOT ms P50", "P90"]
    headers = ["policy", "seed", *(each.name for each in traffic), "whole", *times, "failed", "plans"]
    return Section(title="By seed", headers=headers, rows=rows)


def _plans(runs: Sequence[Run]) -> list[Section]:
    """What Trimtab did, and when."""
    rows = [
        [f"{run.seed}", f"{plan.issued_at_s - run.begun_s:.0f}", _described(plan), plan.reason]
        for run in runs
        for plan in run.plans
    ]
    return [Section(title="Trimtab's plans", headers=["seed", "at s", "plan", "why"], rows=rows)] if rows else []


def _described(plan: Plan) -> str:
    roles = ", ".join(f"{engine} {role.value}" for engine, role in sorted(plan.roles.items()))
    knobs = plan.knobs.model_dump(mode="json", exclude_defaults=True)
    return "; ".join(filter(None, (plan.pattern, roles, ", ".join(f"{name} {value}" for name, value in knobs.items()))))


def _middle(run: Run) -> list[float | None]:
    """Median and 90th percentile of TTFT in seconds and of TPOT in milliseconds."""
    found: list[float | None] = []
    for values in (run.seen.ttft_s, 1e3 * run.seen.tpot_s):
        known = values[~np.isnan(values)]
        found += [float(value) for value in np.percentile(known, (50, 90))] if len(known) else [None, None]
    return found


def _policies(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.policy for run in runs))


def _result(run: Run) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "seed": run.seed,
        "goodput_by_phase_rps": [run.phase(at) for at in range(len(run.parts))],
        "goodput_rps": run.whole,
        "attainment": float(run.good.mean()),
        "failed": int((~run.seen.complete).sum()),
        "plans": [{"at_s": plan.issued_at_s - run.begun_s, "plan": _described(plan)} for plan in run.plans],
    }
