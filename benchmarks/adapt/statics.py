"""Fixed plans: a grid of everything one could set by hand, and the plans that a simulator finds best in hindsight."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tuner.candidates import data_parallel, explicit_knobs, plan_of, split
from tuner.plan import BALANCED, DATA_PARALLEL, DISAGGREGATED, Admission, Knobs, Plan, Policy
from tuner.slo import SloTable
from tuner.twin.forecast import good_requests
from tuner.twin.types import Fleet, Simulator
from tuner.types import Candidate, EngineState
from tuner.workload import Workload

PATTERNS = (DATA_PARALLEL, DISAGGREGATED, BALANCED)
RATIOS = (0.0, 0.1, 0.2, 0.3, 0.5)
MIN_REMOTE_TOKENS = (0, 512, 2048)
CHUNKS = (2048,)
"""Beside what the engines start with."""
INTERVALS = (0, 2)
ADMISSIONS = (Admission.OFF, Admission.SHED)


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate and the share of a workload's requests that met both bounds under it."""

    candidate: Candidate
    attainment: float


def patterns(fleet: Fleet) -> Iterator[Candidate]:
    """Each pattern as it comes, with every policy, ratio and split of roles: what one would choose from by hand."""
    knobs, count = explicit_knobs(states(fleet)), len(fleet)
    for policy in Policy:
        yield data_parallel(count, knobs.model_copy(update={"policy": policy}))
    for prefill, ratio in product(range(1, count), RATIOS):
        yield split(count, prefill, ratio, knobs)


def refinements(candidate: Candidate, fleet: Fleet) -> Iterator[Candidate]:
    """The same pattern, ratio and number of prefill engines with every setting of the other knobs."""
    start = explicit_knobs(states(fleet))
    chunks = list(dict.fromkeys([start.chunked_prefill_tokens, *CHUNKS]))
    common = list(product((Policy.LEAST_LOAD, Policy.PREFIX_AFFINITY), chunks, INTERVALS, ADMISSIONS))
    for policy, chunk, interval, admission in common:
        knobs = candidate.knobs.model_copy(
            update={
                "policy": policy,
                "chunked_prefill_tokens": chunk,
                "prefill_decode_interval": interval,
                "admission": admission,
            }
        )
        yield from _layouts(replace(candidate, knobs=knobs))


def _layouts(candidate: Candidate) -> Iterator[Candidate]:
    """Who prefills short prompts, and whether engines that decode may prefill for others."""
    if candidate.pattern == DATA_PARALLEL:
        yield candidate
        return
    decode = candidate.decode_engines
    for tokens, mixed in product(MIN_REMOTE_TOKENS, (0, decode)):
        knobs = candidate.knobs.model_copy(update={"min_remote_tokens": tokens})
        yield replace(candidate, knobs=knobs, decode_engines=decode - mixed, mixed_engines=mixed)


def states(fleet: Fleet) -> list[EngineState]:
    return [EngineState(engine.engine_id, engine.profile.kind, engine.profile) for engine in fleet]


def fixed_plan(candidate: Candidate, fleet: Fleet) -> Plan:
    return plan_of(candidate, states(fleet))


def score(
    candidates: Iterable[Candidate], workload: Workload, fleet: Fleet, slos: SloTable, run: Simulator
) -> list[Scored]:
    """Every candidate on the workload, best first; of equals, the first given."""
    found = []
    for candidate in candidates:
        timeline = run(workload, fleet, fixed_plan(candidate, fleet), slos)
        found.append(Scored(candidate, float(good_requests(workload, timeline, slos).mean())))
    return sorted(found, key=lambda each: -each.attainment)


def describe(candidate: Candidate) -> str:
    """In a few words, for tables: `balanced 0.3, 2P 6D, interval 4`."""
    knobs = candidate.knobs
    name = candidate.pattern if candidate.pattern != BALANCED else f"balanced {knobs.offload_ratio:g}"
    return ", ".join([name, *_engines(candidate), *_unusual(knobs)])


def _engines(candidate: Candidate) -> Sequence[str]:
    if candidate.pattern == DATA_PARALLEL:
        return []
    counts = (candidate.prefill_engines, candidate.decode_engines, candidate.mixed_engines)
    return [" ".join(f"{count}{letter}" for count, letter in zip(counts, "PDM", strict=True) if count)]


def _unusual(knobs: Knobs) -> Iterator[str]:
    if knobs.policy is not Policy.LEAST_LOAD:
        yield knobs.policy.value.replace("_", " ")
    if knobs.min_remote_tokens:
        yield f"remote from {knobs.min_remote_tokens:,}"
    if knobs.admission is not Admission.OFF:
        yield knobs.admission.value
    if knobs.chunked_prefill_tokens:
        yield f"chunk {knobs.chunked_prefill_tokens:,}"
    if knobs.prefill_decode_interval:
        yield f"interval {knobs.prefill_decode_interval}"
