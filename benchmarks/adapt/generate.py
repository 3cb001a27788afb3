"""Arrivals from scenarios: the same seed gives the same requests, whatever is done with them."""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from benchmarks.adapt.scenarios import (
    Arrivals,
    Empirical,
    Fixed,
    Gamma,
    Lengths,
    OnOff,
    Phase,
    Requests,
    Roots,
    Scenario,
    Sessions,
)
from tuner.workload import Floats, Ints, Workload, concatenate

ANSWER_S_PER_TOKEN = 0.02
"""How long users of conversations read along before they think: arrivals must not depend on who serves them."""

LEADS = 3.0
"""Conversations under way when a phase begins started at most so many mean conversations before."""

Column = TypeVar("Column", Floats, Ints)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Requests before they are in order: columns."""

    arrived_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    session: Ints
    root: Ints
    root_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrived_s)

    def where(self, rows: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> "Asked":
        return Asked(*(getattr(self, field.name)[rows] for field in fields(self)))


def generate(scenario: Scenario, seed: int) -> Workload:
    """All phases, one after the other."""
    return concatenate(phases(scenario, seed))


def phases(scenario: Scenario, seed: int) -> list[Workload]:
    """Each phase by itself, from second 0. A phase's requests depend on the seed and its place, not on the others."""
    streams = np.random.SeedSequence(seed).spawn(len(scenario.phases))
    return [
        phase_workload(scenario, phase, np.random.default_rng(stream))
        for phase, stream in zip(scenario.phases, streams, strict=True)
    ]


def phase_workload(scenario: Scenario, phase: Phase, rng: np.random.Generator) -> Workload:
    """The requests of one phase."""
    traffic, classes = scenario.traffic[phase.traffic], tuple(scenario.slos.classes)
    profile = scenario.profile
    limit = min(profile.context_length_tokens, profile.kv_capacity_tokens)
    whole = sum(requests.share for requests in traffic.mix)
    parts = []
    for requests in traffic.mix:
        rate_rps = phase.rate_rps * requests.share / whole
        asked = _asked(requests, traffic.arrivals, rate_rps, phase.duration_s, limit, rng)
        parts.append((asked, classes.index(requests.slo_class)))
    return _merged(parts, phase.duration_s, classes)


def arrivals(process: Arrivals, rate_rps: float, span_s: float, rng: np.random.Generator) -> Floats:
    """Times in `[0, span_s)`, in order, `rate_rps` a second on average over any long span."""
    if isinstance(process, OnOff):
        return _on_off(process, rate_rps, span_s, rng)
    shape = 1 / process.cv**2 if isinstance(process, Gamma) else 1.0
    expected = rate_rps * span_s
    # Six standard deviations more than will be needed.
    count = int(expected + 6 * np.sqrt(expected / shape) + 20 / shape)
    gaps_s = rng.gamma(shape, 1 / (shape * rate_rps), size=count)
    times_s = np.cumsum(gaps_s)
    return times_s[times_s < span_s]


def lengths(distribution: Lengths, count: int, rng: np.random.Generator) -> Ints:
    """Token counts, each at least 1."""
    if isinstance(distribution, Fixed):
        return np.full(count, distribution.tokens, dtype=np.int64)
    if isinstance(distribution, Empirical):
        quantiles = np.asarray(distribution.quantiles, dtype=float)
        drawn = np.interp(rng.uniform(size=count), np.linspace(0, 1, len(quantiles)), quantiles)
    else:
        drawn = distribution.median * np.exp(distribution.sigma * rng.standard_normal(count))
        drawn = np.clip(drawn, distribution.low, distribution.high)
    rounded: Ints = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return rounded


def _on_off(process: OnOff, rate_rps: float, span_s: float, rng: np.random.Generator) -> Floats:
    """Candidates at the bursts' rate, thinned in the pauses. The cycle starts at a random place."""
    cycle_s = process.on_s + process.off_s
    burst_rps = rate_rps * cycle_s / (process.on_s + process.quiet * process.off_s)
    count = rng.poisson(burst_rps * span_s)
    times_s = np.sort(rng.uniform(0, span_s, size=count))
    in_burst = (times_s + rng.uniform(0, cycle_s)) % cycle_s < process.on_s
    return times_s[in_burst | (rng.uniform(size=count) < process.quiet)]


def _asked(
    requests: Requests, process: Arrivals, rate_rps: float, span_s: float, limit: int, rng: np.random.Generator
) -> Asked:
    """What one kind of request contributes to a phase; conversations may be under way when it begins."""
    sessions = requests.sessions or Sessions(turns=1, think_s=1)
    lead_s = LEADS * (sessions.turns - 1) * _turn_s(requests, sessions, rng)
    begun_s = arrivals(process, rate_rps / sessions.turns, span_s + lead_s, rng) - lead_s
    turns = rng.geometric(1 / sessions.turns, size=len(begun_s))
    asked = _turns(requests, sessions, begun_s, turns, rng)
    fits = asked.prompt_tokens + asked.output_tokens <= limit
    return asked.where(fits & (asked.arrived_s >= 0) & (asked.arrived_s < span_s))


def _turn_s(requests: Requests, sessions: Sessions, rng: np.random.Generator) -> float:
    return sessions.think_s + ANSWER_S_PER_TOKEN * float(lengths(requests.output_tokens, 1000, rng).mean())


def _turns(requests: Requests, sessions: Sessions, begun_s: Floats, turns: Ints, rng: np.random.Generator) -> Asked:
    """Every turn of every session, sessions one after the other."""
    session = np.repeat(np.arange(len(turns)), turns)
    first = np.repeat(np.cumsum(turns) - turns, turns)
    added = lengths(requests.input_tokens, len(session), rng)
    output = lengths(requests.output_tokens, len(session), rng)
    pauses_s = rng.exponential(sessions.think_s, size=len(session)) + ANSWER_S_PER_TOKEN * output
    root, root_tokens = _roots(requests.roots, len(turns), rng)
    return Asked(
        arrived_s=begun_s[session] + _running(pauses_s, first) - pauses_s,
        prompt_tokens=root_tokens[session] + _running(added + output, first) - output,
        output_tokens=output,
        session=session,
        root=root[session],
        root_tokens=root_tokens[session],
    )


def _roots(roots: Roots | None, sessions: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """The root of each session and its tokens. Without roots each session has its own, of no tokens."""
    if roots is None:
        return np.arange(sessions), np.zeros(sessions, dtype=np.int64)
    popularity = (1.0 + np.arange(roots.count)) ** -roots.skew
    chosen = rng.choice(roots.count, size=sessions, p=popularity / popularity.sum())
    return chosen.astype(np.int64), np.full(sessions, roots.tokens, dtype=np.int64)


def _running(values: Column, first: Ints) -> Column:
    """Sums from the start of each session up to and with each row; `first` is the row at which its session starts."""
    sums = np.cumsum(values)
    return sums - (sums - values)[first]


def _merged(parts: list[tuple[Asked, int]], span_s: float, classes: tuple[str, ...]) -> Workload:
    """Put the kinds of request of a mix into one order; their sessions and roots stay apart."""
    moved, sessions, roots = [], 0, 0
    for asked, _ in parts:
        moved.append(replace(asked, session=asked.session + sessions, root=asked.root + roots))
        sessions += int(asked.session.max(initial=-1)) + 1
        roots += int(asked.root.max(initial=-1)) + 1
    slo_class = np.repeat([number for _, number in parts], [len(asked) for asked, _ in parts])
    columns = {field.name: np.concatenate([getattr(each, field.name) for each in moved]) for field in fields(Asked)}
    unordered = Workload(
        span_s=span_s,
        classes=classes,
        slo_class=slo_class.astype(np.int64),
        **{**columns, "arrived_s": np.zeros(len(slo_class))},
    )
    order = np.argsort(columns["arrived_s"], kind="stable")
    return replace(unordered.take(order), arrived_s=columns["arrived_s"][order])
