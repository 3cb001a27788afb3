"""Policy after policy over real processes, each from a cold start, on the same requests."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapt.closed_loop import TRIMTAB
from benchmarks.adapt.generate import phases
from benchmarks.adapt.hindsight import Course, screen
from benchmarks.adapt.live.load import Client
from benchmarks.adapt.live.stack import LiveStack, live_stack
from benchmarks.adapt.outcome import Change, Flags, Outcome, series
from benchmarks.adapt.scenarios import Scenario, load_scenario
from benchmarks.adapt.statics import PATTERNS, describe, fixed_plan, states
from benchmarks.adapt.summary import SERIES_S
from benchmarks.machine import describe as describe_machine
from benchmarks.machine import versions
from benchmarks.progress import progress
from benchmarks.report import Report, Section, number
from tuner.candidates import candidate_of
from tuner.plan import IssuedBy, Plan
from tuner.types import Candidate
from tuner.workload import Workload, concatenate

SCENARIO = "shift-laptop"
QUICK_PHASE_S = 40.0
PACKAGES = ("trimtab", "numba", "optuna", "scikit-learn", "redis")


@dataclass(frozen=True, slots=True)
class LiveOptions:
    seed: int
    quick: bool
    policies: Sequence[str] = (*PATTERNS, TRIMTAB)


async def run_live(options: LiveOptions) -> Report:
    """Raises what `live_stack` raises."""
    scenario = load_scenario(SCENARIO)
    if options.quick:
        scenario = scenario.shortened(QUICK_PHASE_S, len(scenario.phases))
    parts = phases(scenario, options.seed)
    outcomes = []
    with progress() as bar:
        task = bar.add_task("finding each pattern's best fixed plan", total=len(options.policies))
        plans = await asyncio.to_thread(_best_plans, scenario, parts)
        for policy in options.policies:
            bar.update(task, description=policy)
            outcomes.append(await _outcome(policy, plans.get(policy), scenario, concatenate(parts)))
            bar.advance(task)
    return report(scenario, parts, outcomes, options.seed)


def _best_plans(scenario: Scenario, parts: Sequence[Workload]) -> Mapping[str, Candidate]:
    fleet, slos = scenario.fleet, scenario.slos
    return Course(concatenate(list(parts)), fleet, slos).pattern_plans(screen(parts, fleet, slos))


async def _outcome(policy: str, candidate: Candidate | None, scenario: Scenario, workload: Workload) -> Outcome:
    """One policy from a cold start; without a candidate, the tuner's."""
    async with _stack(scenario) as stack:
        if candidate is None:
            await stack.tuned()
        else:
            await stack.pin(fixed_plan(candidate, scenario.fleet))
        before = len(await stack.plans())
        good, begun_s = await _good(stack, scenario, workload)
        issued = [Plan.model_validate(each) for each in await stack.plans()]
    changes = [_change(plan, scenario, begun_s) for plan in issued[before:]]
    shown = describe(candidate) if candidate is not None else describe(candidate_of(issued[-1], states(scenario.fleet)))
    return Outcome(policy, shown, good, changes)


@asynccontextmanager
async def _stack(scenario: Scenario) -> AsyncIterator[LiveStack]:
    with tempfile.TemporaryDirectory(prefix="trimtab-live-") as folder:
        async with live_stack(scenario, Path(folder)) as stack:
            yield stack


async def _good(stack: LiveStack, scenario: Scenario, workload: Workload) -> tuple[Flags, float]:
    """Which requests met both bounds, and the Unix time at which the first second began."""
    async with aclosing(Client(stack.url, stack.model, workload)) as client:
        begun_s = time.time()
        return (await client.run()).good(workload, scenario.slos), begun_s


def _change(plan: Plan, scenario: Scenario, begun_s: float) -> Change:
    shown = describe(candidate_of(plan, states(scenario.fleet)))
    reason = "tuner" if plan.issued_by is IssuedBy.TUNER else plan.issued_by.value
    return Change(plan.issued_at_s - begun_s, reason, shown, plan.reason)


def report(scenario: Scenario, parts: Sequence[Workload], outcomes: Sequence[Outcome], seed: int) -> Report:
    """Goodput by phase, one row a policy."""
    return Report(
        benchmark="adapt --live",
        seed=seed,
        versions=versions(PACKAGES),
        machine=describe_machine(),
        results=[_result(scenario, parts, each) for each in outcomes],
        goals=[],
        headline=headline(scenario, outcomes),
        sections=[_section(scenario, parts, outcomes)],
    )


def headline(scenario: Scenario, outcomes: Sequence[Outcome]) -> list[str]:
    """Every policy's goodput in one sentence."""
    figures = [f"{each.policy} {number(float(each.good.sum()) / scenario.span_s)}" for each in outcomes]
    return [f"Good requests/s over {scenario.span_s:g} s: {', '.join(figures)}"] if figures else []


def by_phase(good: Flags, parts: Sequence[Workload]) -> list[float]:
    """Goodput of each phase, requests a second."""
    ends = [sum(len(part) for part in parts[: at + 1]) for at in range(len(parts))]
    return [float(good[end - len(part) : end].sum()) / part.span_s for part, end in zip(parts, ends, strict=True)]


def _section(scenario: Scenario, parts: Sequence[Workload], outcomes: Sequence[Outcome]) -> Section:
    offered = [f"{phase.traffic}, {part.rate_rps:.1f}/s" for phase, part in zip(scenario.phases, parts, strict=True)]
    rows = [
        [
            each.policy,
            *(number(goodput) for goodput in by_phase(each.good, parts)),
            number(float(each.good.sum()) / scenario.span_s),
            f"{each.attainment:.1%}",
            str(len(each.changes)),
            each.plan,
        ]
        for each in outcomes
    ]
    notes = [
        f"Trimtab {change.at_s:.0f} s: {change.plan}. {change.sentence}" for each in outcomes for change in each.changes
    ]
    headers = ["policy", *offered, "goodput/s", "attainment", "changes", "plan"]
    title = f"{scenario.title}: {scenario.engines.count} emulated engines, router, Redis and controller as processes"
    return Section(title=title, headers=headers, rows=rows, notes=notes)


def _result(scenario: Scenario, parts: Sequence[Workload], each: Outcome) -> dict[str, Any]:
    arrived_s = concatenate(list(parts)).arrived_s
    return {
        "scenario": scenario.name,
        "policy": each.policy,
        "plan": each.plan,
        "goodput_by_phase_rps": by_phase(each.good, parts),
        "attainment": each.attainment,
        "changes": [{"at_s": change.at_s, "plan": change.plan, "why": change.sentence} for change in each.changes],
        "goodput_by_minute_rps": series(each.good, arrived_s, scenario.span_s, SERIES_S).round(1).tolist(),
    }
