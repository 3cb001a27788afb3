"""How the rates in `traces.toml` were found: `python -m benchmarks.traces.calibrate FOLDER` prints them.

What a fleet of `ENGINES` carries is the highest rate at which some plain static plan, out of every pattern with every
policy, ratio and split of roles, still serves `TARGET` of the requests within their bounds. The traces are played at
`LOAD` of that per engine in fleets of all sizes; larger ones carry a little more per engine.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from benchmarks.adapt.statics import Scored, describe, patterns, score
from benchmarks.traces.catalog import load_traces
from benchmarks.traces.cells import base_of, bounds_of, fleet_of
from benchmarks.traces.scale import scaled
from benchmarks.traces.slos import ATTAINMENT, LEVELS
from tuner.twin.fast import simulate
from tuner.types import Candidate
from tuner.workload import Workload

ENGINES = 4
SPAN_S = 600.0
TARGET = ATTAINMENT
LOAD = 0.8
STEP = 1.25
"""Factor between the first rates tried."""
PRECISION = 0.03


class Carrying:
    """What plans of one trace and level carry."""

    def __init__(self, trace: str, level: str, whole: Workload, seed: int) -> None:
        self._fleet = fleet_of(load_traces()[trace], ENGINES)
        self._slos = bounds_of(trace, level)
        self._whole = whole
        self._seed = seed

    def most_rps(self, guess_rps: float) -> tuple[float, Scored]:
        """The highest rate of the whole fleet, and the plan that carries it."""
        everything = list(patterns(self._fleet))
        low_rps, high_rps = guess_rps, STEP * guess_rps
        while not (able := self._able(low_rps, everything)):
            low_rps, high_rps = low_rps / STEP, low_rps
        while found := self._able(high_rps, _plans(able)):
            able, low_rps, high_rps = found, high_rps, STEP * high_rps
        while high_rps - low_rps > PRECISION * high_rps:
            rate_rps = (low_rps + high_rps) / 2
            if found := self._able(rate_rps, _plans(able)):
                able, low_rps = found, rate_rps
            else:
                high_rps = rate_rps
        return low_rps, able[0]

    def _able(self, rate_rps: float, candidates: Sequence[Candidate]) -> list[Scored]:
        """Those that serve the target at this rate, best first; the others cannot at a higher one."""
        workload = scaled(self._whole, SPAN_S, rate_rps, self._seed)
        ranked = score(candidates, workload, self._fleet, self._slos, simulate)
        return [each for each in ranked if each.attainment >= TARGET]


def _plans(ranked: Sequence[Scored]) -> list[Candidate]:
    return [each.candidate for each in ranked]


def rates(folder: Path | None, seed: int) -> Iterator[tuple[str, str, float, Scored]]:
    """Trace, level, rate per engine for the data file, and the plan that carries most."""
    for name, trace in load_traces().items():
        whole = base_of(name, seed, folder).workload
        for level in LEVELS:
            most_rps, best = Carrying(name, level, whole, seed).most_rps(trace.rates_rps[level] * ENGINES)
            yield name, level, float(f"{LOAD * most_rps / ENGINES:.2g}"), best


def main(folder: Path, seed: int = 1) -> None:
    """Print the rates from the traces in a folder."""
    for name, level, rate_rps, best in rates(folder, seed):
        print(f"{name}: {level} {rate_rps:g}/s and engine; {describe(best.candidate)} carries most", flush=True)


if __name__ == "__main__":
    typer.run(main)
