"""The best fixed plans of a workload, found by exhaustive search in hindsight and measured in the world.

The grid has two levels: every pattern with every policy, ratio and split of roles; then, for the best few of those,
every setting of the other knobs. The twin runs all of it on the beginning of each phase, the better part on longer
beginnings and the best on everything; what counts is what the world then says of the winner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.adapt.outcome import Outcome
from benchmarks.adapt.statics import PATTERNS, Scored, patterns, refinements, score
from benchmarks.adapt.world import THRESHOLD_TOKENS, run_fixed, run_threshold
from tuner.plan import DATA_PARALLEL
from tuner.slo import SloTable
from tuner.twin.fast import simulate
from tuner.twin.types import Fleet
from tuner.types import Candidate
from tuner.workload import Workload, concatenate

BEST_STATIC = "best_static"
THRESHOLD = "threshold"
ORACLE = "oracle"
FIRST_S, SECOND_S = 40.0, 120.0
"""Of each phase, in the first and second round: enough for queues to show."""
KEPT = 0.25
"""Share of the plans that come into the second round."""
KEPT_OF_PATTERN = 4
"""Of each pattern at least so many."""
REFINED = 2
"""Plans of the first level whose other knobs are searched."""
FINALISTS = 6
"""Plans that are compared on the whole workload where one is wanted."""


@dataclass(frozen=True, slots=True)
class Grid:
    """All plans of both levels, best first."""

    plain: Sequence[Scored]
    """Of the first level only."""
    all: Sequence[Scored]

    def best_of(self, pattern: str) -> list[Candidate]:
        """Plain plans of a pattern, best first."""
        return [each.candidate for each in self.plain if each.candidate.pattern == pattern]

    def best_splits(self) -> list[Candidate]:
        """Plain plans that prefill remotely, best first."""
        return [each.candidate for each in self.plain if each.candidate.pattern != DATA_PARALLEL]


def screen(phases: Sequence[Workload], fleet: Fleet, slos: SloTable) -> Grid:
    """Every plan of the grid in the twin, on the beginnings of the phases."""
    plain = _two_rounds(list(patterns(fleet)), phases, fleet, slos)
    finer = [each for best in plain[:REFINED] for each in refinements(best.candidate, fleet)]
    refined = _two_rounds(list(dict.fromkeys(finer)), phases, fleet, slos)
    return Grid(plain, sorted([*plain, *refined], key=lambda each: -each.attainment))


def _two_rounds(
    candidates: Sequence[Candidate], phases: Sequence[Workload], fleet: Fleet, slos: SloTable
) -> list[Scored]:
    first, second = (concatenate([phase.until(span_s) for phase in phases]) for span_s in (FIRST_S, SECOND_S))
    ranked = [each.candidate for each in score(candidates, first, fleet, slos, simulate)]
    kept = ranked[: max(1, int(KEPT * len(ranked)))]
    for pattern in PATTERNS:
        kept += [each for each in ranked if each.pattern == pattern][:KEPT_OF_PATTERN]
    return score(dict.fromkeys(kept), second, fleet, slos, simulate)


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """What plans are measured on."""

    workload: Workload
    fleet: Fleet
    slos: SloTable

    def best_fixed(self, policy: str, grid: Grid) -> Outcome:
        """The best plan of the whole grid."""
        return self._measured(policy, self._winner(unlike(grid.all, FINALISTS)))

    def best_patterns(self, grid: Grid) -> list[Outcome]:
        return [self._measured(pattern, plan) for pattern, plan in self.pattern_plans(grid).items()]

    def pattern_plans(self, grid: Grid) -> Mapping[str, Candidate]:
        """Each pattern as it comes, with its best policy, ratio and split of roles; none for one that has no plan."""
        best = {pattern: grid.best_of(pattern)[:FINALISTS] for pattern in PATTERNS}
        return {pattern: self._winner(found) for pattern, found in best.items() if found}

    def best_threshold(self, grid: Grid) -> Outcome | None:
        """The threshold rule on the split of roles that suits it best; `None` if there is nothing to split."""
        splits = grid.best_splits()[:FINALISTS]
        if not splits:
            return None
        # The twin has no rule that looks at each request: the plan that it mostly comes to must do.
        chosen = self._winner([rule_of(each) for each in splits])
        return run_threshold(THRESHOLD, chosen, self.workload, self.fleet, self.slos)

    def _winner(self, candidates: Sequence[Candidate]) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        return score(candidates, self.workload, self.fleet, self.slos, simulate)[0].candidate

    def _measured(self, policy: str, candidate: Candidate) -> Outcome:
        return run_fixed(policy, candidate, self.workload, self.fleet, self.slos)


def unlike(ranked: Sequence[Scored], most: int) -> list[Candidate]:
    """The best of those that score differently: equal scores mostly come from knobs that change nothing."""
    firsts = {each.attainment: each.candidate for each in reversed(ranked)}
    return [firsts[attainment] for attainment in sorted(firsts, reverse=True)[:most]]


def rule_of(candidate: Candidate) -> Candidate:
    """A split with the rule's bound on what is prefilled remotely."""
    knobs = candidate.knobs.model_copy(update={"min_remote_tokens": THRESHOLD_TOKENS})
    return replace(candidate, knobs=knobs)
