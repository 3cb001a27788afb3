"""What a search is asked. Light to import: whoever only hands tasks on needs no optimiser."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.corrections import Corrections
from tuner.plan import Plan
from tuner.settings import TunerSettings
from tuner.slo import SloTable
from tuner.types import Candidate, EngineState, HotContext
from tuner.workload import Workload


@dataclass(frozen=True, slots=True)
class SearchTask:
    """All that a search needs; it can be sent to another process."""

    workload: Workload
    engines: Sequence[EngineState]
    slos: SloTable
    plan: Plan
    """In force now."""
    guesses: Sequence[Candidate] = ()
    """Past winners for like traffic, tried first."""
    backlog_s: float = 0.0
    """Seconds' worth of requests that have probably piled up under a plan made for other traffic."""
    corrections: Corrections = field(default_factory=Corrections)
    settings: TunerSettings = field(default_factory=TunerSettings)
    seed: int = 1
    hot: Sequence[HotContext] = ()
    """What most prompts begin with: would copies of it pay?"""
