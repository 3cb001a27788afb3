"""Outcomes that need not be measured again, in a folder: a table of hours survives being interrupted."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

import tuner
from benchmarks.adapt.outcome import Change, Outcome

WORLD = (
    *(f"benchmarks/adapt/{name}.py" for name in ("generate", "hindsight", "outcome", "scenarios", "statics", "world")),
    *(f"engines/{name}.py" for name in ("errors", "prefill_rate", "protocol", "records", "sampling", "types")),
    *(
        f"engines/emulated/{name}.py"
        for name in (
            "events",
            "kernel",
            "link",
            "pool",
            "profile",
            "radix",
            "reservations",
            "scheduler",
            "sequences",
        )
    ),
    *(
        f"tuner/{name}.py"
        for name in ("blame", "candidates", "placement", "plan", "prefix", "slo", "types", "workload")
    ),
    "tuner/twin/**/*.py",
)
"""Code that fixed plans' outcomes rest on: all that `benchmarks.adapt.hindsight` imports, so not the search."""
TUNER = ("benchmarks/adapt/closed_loop.py", "tuner/**/*.py")
"""Code that Trimtab's rest on beside that."""


def kept_name(scenario: str, asked: object, code: Sequence[str]) -> str:
    """A file name that is another one for another question or other code."""
    digest = hashlib.sha256(msgspec.json.encode(asked))
    for file in files_of(code):
        digest.update(file.read_bytes())
    return f"{scenario}-{digest.hexdigest()[:16]}.npz"


def files_of(code: Sequence[str]) -> Sequence[Path]:
    """The files that the patterns name, each once."""
    root = Path(tuner.__file__).parents[1]
    return sorted({file for pattern in code for file in root.glob(pattern)})


def kept_or(file: Path | None, measure: Callable[[], Sequence[Outcome]]) -> Sequence[Outcome]:
    """What the file holds, or what is measured now and then put there; without a file nothing is kept."""
    if file is None:
        return measure()
    if file.exists():
        return load_outcomes(file)
    outcomes = measure()
    save_outcomes(file, outcomes)
    return outcomes


def save_outcomes(file: Path, outcomes: Sequence[Outcome]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    told = [(each.policy, each.plan, each.changes, each.thought_s) for each in outcomes]
    good = {f"good{at}": each.good for at, each in enumerate(outcomes)}
    np.savez_compressed(file, allow_pickle=False, told=np.frombuffer(msgspec.json.encode(told), np.uint8), **good)


def load_outcomes(file: Path) -> list[Outcome]:
    with np.load(file) as held:
        told = msgspec.json.decode(held["told"].tobytes(), type=list[tuple[str, str, list[Change], float]])
        return [
            Outcome(policy, plan, held[f"good{at}"], changes, thought_s)
            for at, (policy, plan, changes, thought_s) in enumerate(told)
        ]
