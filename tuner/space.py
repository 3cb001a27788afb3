"""The search space: candidates as Optuna parameters, and small steps between them."""

from collections.abc import Mapping, Sequence

import numpy as np
import optuna

from tuner.candidates import data_parallel, explicit_knobs, split
from tuner.plan import DATA_PARALLEL, Admission, Knobs, Policy
from tuner.types import Candidate, EngineState

Parameters = dict[str, str | int | float]

ONE, SPLIT = "one_engine", "split"
RATIO_STEP = 0.05
MOST_RATIO = 0.6
MIN_REMOTE = (0, 256, 512, 1024, 2048, 4096)
BYPASS = (0.5, 0.7, 0.9)
INFLIGHT = (2, 4, 8, 16, 32)
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16384)
INTERVALS = (0, 1, 2, 4, 8)
POLICIES = (Policy.LEAST_LOAD, Policy.PREFIX_AFFINITY)
ADMISSIONS = (Admission.OFF, Admission.SHED)
MIXED_PARTS = (0.0, 0.25, 0.5, 1.0)
"""Of the engines that do not prefill only, how many do both."""


class Space:
    """Everything that may be chosen on a fleet. A fleet of one engine has nothing to split."""

    def __init__(self, engines: Sequence[EngineState]) -> None:
        self._engines = len(engines)
        self._defaults = explicit_knobs(engines)
        # Engines have left memory for passes of the size that they start with: larger ones may be too large.
        most = self._defaults.chunked_prefill_tokens or CHUNKS[-1]
        self._chunks = sorted({most, *(each for each in CHUNKS if each < most)})

    def candidate(self, trial: optuna.Trial) -> Candidate:
        """What Optuna proposes."""
        layouts = (ONE, SPLIT) if self._engines > 1 else (ONE,)
        layout = trial.suggest_categorical("layout", layouts)
        knobs = self._common(trial)
        if layout == ONE:
            return data_parallel(self._engines, knobs)
        prefill = trial.suggest_int("prefill", 1, self._engines - 1)
        ratio = round(trial.suggest_float("ratio", 0.0, MOST_RATIO, step=RATIO_STEP), 2)
        mixed = round(trial.suggest_categorical("mixed_part", MIXED_PARTS) * (self._engines - prefill))
        return split(self._engines, prefill, ratio, self._split_knobs(trial, knobs), mixed)

    def parameters(self, candidate: Candidate) -> Parameters:
        """The point of the space that is nearest to a candidate."""
        knobs = candidate.knobs
        found: Parameters = {
            "layout": ONE if candidate.pattern == DATA_PARALLEL or self._engines < 2 else SPLIT,
            "policy": knobs.policy.value if knobs.policy in POLICIES else Policy.LEAST_LOAD.value,
            "chunk": _nearest(self._chunks, knobs.chunked_prefill_tokens or self._defaults.chunked_prefill_tokens or 0),
            "interval": _nearest(INTERVALS, knobs.prefill_decode_interval or 0),
            "admission": knobs.admission.value if knobs.admission in ADMISSIONS else Admission.OFF.value,
        }
        if found["layout"] == ONE:
            return found
        prefill = min(self._engines - 1, max(1, candidate.prefill_engines))
        part = candidate.mixed_engines / max(1, self._engines - prefill)
        return found | {
            "prefill": prefill,
            "ratio": round(RATIO_STEP * round(min(MOST_RATIO, knobs.offload_ratio) / RATIO_STEP), 2),
            "mixed_part": _nearest(MIXED_PARTS, part),
            "min_remote": _nearest(MIN_REMOTE, knobs.min_remote_tokens),
            "bypass": _nearest(BYPASS, knobs.bypass_cached_fraction),
            "inflight": _nearest(INFLIGHT, knobs.max_inflight_transfers),
        }

    def neighbour(self, candidate: Candidate, rng: np.random.Generator) -> Parameters:
        """One parameter of a candidate moved by one step, up or down."""
        here = self.parameters(candidate)
        moves = [move for move in STEPS if move in here]
        name = moves[int(rng.integers(len(moves)))]
        way = 1 if rng.random() < 0.5 else -1
        return here | {name: self._moved(name, here[name], way)}

    def _moved(self, name: str, value: str | float, way: int) -> str | int | float:
        if name == "prefill":
            return min(self._engines - 1, max(1, int(value) + way))
        if name == "ratio":
            return round(min(MOST_RATIO, max(0.0, float(value) + way * RATIO_STEP)), 2)
        choices = self._chunks if name == "chunk" else STEPS[name]
        return choices[(choices.index(value) + way) % len(choices)]

    def _common(self, trial: optuna.Trial) -> Knobs:
        return Knobs(
            policy=Policy(trial.suggest_categorical("policy", [policy.value for policy in POLICIES])),
            chunked_prefill_tokens=int(trial.suggest_categorical("chunk", self._chunks)),
            prefill_decode_interval=int(trial.suggest_categorical("interval", INTERVALS)),
            admission=Admission(trial.suggest_categorical("admission", [each.value for each in ADMISSIONS])),
        )

    @staticmethod
    def _split_knobs(trial: optuna.Trial, common: Knobs) -> Knobs:
        return common.model_copy(
            update={
                "min_remote_tokens": int(trial.suggest_categorical("min_remote", MIN_REMOTE)),
                "bypass_cached_fraction": float(trial.suggest_categorical("bypass", BYPASS)),
                "max_inflight_transfers": int(trial.suggest_categorical("inflight", INFLIGHT)),
            }
        )


STEPS: Mapping[str, Sequence[str | int | float]] = {
    "prefill": (),
    "ratio": (),
    "policy": [policy.value for policy in POLICIES],
    "chunk": (),
    "interval": INTERVALS,
    "admission": [each.value for each in ADMISSIONS],
    "mixed_part": MIXED_PARTS,
    "min_remote": MIN_REMOTE,
    "bypass": BYPASS,
    "inflight": INFLIGHT,
}
"""What `neighbour` may move; those without a list depend on the fleet."""


def _nearest(choices: Sequence[int] | Sequence[float], value: float) -> int | float:
    return min(choices, key=lambda choice: abs(choice - value))
