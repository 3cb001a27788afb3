"""What is kept of a trace, so that load like it can be made where the trace is not: `data/*.json`.

`python -m benchmarks.traces.statistics FOLDER` makes those files from the traces in a folder.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import typer

from benchmarks.traces.catalog import Trace, load_traces
from benchmarks.traces.read import MOONCAKE, mooncake_rows, read_trace
from benchmarks.traces.sessions import kept_tokens, shared_tokens
from tuner.workload import Floats, Ints, Workload

DATA = Path(__file__).parent / "data"
BIN_S = 10.0
"""Rates are means over so long."""
STEP_S = 1.0
"""Clumps of arrivals are looked at in steps of this."""
QUANTILES = 401
SEED = 1


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in a few columns. Quantiles are evenly spread from 0 to 1."""

    source: str
    licence: str
    requests: int
    span_s: float
    sessions_per_bin: Sequence[int]
    """Sessions that begin in each `BIN_S`."""
    cv: float
    """Coefficient of variation of the gaps between them, beyond what the bins tell: 1 for Poisson."""
    turns: Sequence[float]
    """Share of the sessions with 1, 2, ... requests."""
    pauses_s: Sequence[float]
    """Quantiles of the time between two requests of a session; empty if there are none."""
    first_tokens: Sequence[float]
    """Quantiles of a session's first prompt."""
    added_tokens: Sequence[float]
    """Quantiles of how much longer the next prompt is; empty if there is none."""
    output_tokens: Sequence[float]
    p90_prompt_tokens: int
    p90_output_tokens: int
    root_tokens: int
    """That all prompts share."""
    shared_share: float | None
    """Of all prompt tokens, those that came before, by the trace's blocks; `None` where it does not tell."""
    kept_share: float | None
    """Those that the workload's sessions and root keep of that."""


def load_statistics(name: str) -> Statistics:
    """Of a trace by its name. Raises `OSError` or `msgspec.DecodeError`."""
    return msgspec.json.decode((DATA / f"{name}.json").read_bytes(), type=Statistics)


def statistics_of(workload: Workload, trace: Trace, shared_share: float | None = None) -> Statistics:
    """Of a whole trace, see `Statistics`."""
    first, later, before = _turns(workload.session)
    began_s = workload.arrived_s[first]
    whole = float(workload.prompt_tokens.sum())
    return Statistics(
        source=trace.source,
        licence=trace.licence,
        requests=len(workload),
        span_s=round(workload.span_s, 1),
        sessions_per_bin=counts(began_s, workload.span_s, BIN_S).tolist(),
        cv=round(clumps_cv(began_s, workload.span_s), 2),
        turns=_shares(workload.session),
        pauses_s=_quantiles(workload.arrived_s[later] - workload.arrived_s[before]),
        first_tokens=_quantiles(workload.prompt_tokens[first]),
        added_tokens=_quantiles(workload.prompt_tokens[later] - workload.prompt_tokens[before]),
        output_tokens=_quantiles(workload.output_tokens),
        p90_prompt_tokens=_p90(workload.prompt_tokens),
        p90_output_tokens=_p90(workload.output_tokens),
        root_tokens=int(workload.root_tokens.max(initial=0)),
        shared_share=None if shared_share is None else round(shared_share, 4),
        kept_share=None if shared_share is None else round(kept_tokens(workload) / whole, 4),
    )


def counts(at_s: Floats, span_s: float, step_s: float) -> Ints:
    """Events in each whole or broken step of a span."""
    edges = np.arange(0.0, span_s + step_s, step_s)
    found: Ints = np.histogram(at_s, edges)[0].astype(np.int64)
    return found


def clumps_cv(at_s: Floats, span_s: float) -> float:
    """Of gaps, from how counts of `STEP_S` vary within bins of `BIN_S`: the root of variance over mean."""
    per_bin = round(BIN_S / STEP_S)
    steps = counts(at_s, span_s, STEP_S)
    bins = steps[: len(steps) // per_bin * per_bin].reshape(-1, per_bin)
    mean = float(bins.mean())
    return float(np.sqrt(bins.var(axis=1, ddof=1).mean() / mean)) if mean else 1.0


def _turns(session: Ints) -> tuple[Ints, Ints, Ints]:
    """Rows that begin a session, rows that go on with one, and for each of the latter the row before it."""
    order = np.argsort(session, kind="stable")
    same = session[order][1:] == session[order][:-1]
    begins = np.concatenate([[True], ~same]) if len(order) else np.zeros(0, dtype=np.bool_)
    return order[begins], order[1:][same], order[:-1][same]


def _shares(session: Ints) -> list[float]:
    turns = np.bincount(np.bincount(session))[1:]
    return [round(float(share), 5) for share in turns / turns.sum()]


def _quantiles(values: "Floats | Ints") -> list[float]:
    if not len(values):
        return []
    return [round(float(each), 1) for each in np.quantile(values, np.linspace(0, 1, QUANTILES))]


def _p90(tokens: Ints) -> int:
    return int(np.quantile(tokens, 0.9, method="inverted_cdf"))


def _made(folder: Path) -> Iterator[tuple[str, Statistics]]:
    for name, trace in load_traces().items():
        file = folder / trace.file
        yield name, statistics_of(read_trace(file, SEED), trace, _shared_share(file))


def _shared_share(file: Path) -> float | None:
    if file.suffix != MOONCAKE:
        return None
    rows = mooncake_rows(file)
    tokens = np.array([row.input_length for row in rows], dtype=np.int64)
    return shared_tokens([row.hash_ids for row in rows], tokens) / float(tokens.sum())


def main(folder: Path) -> None:
    """Make the data files anew from the traces in a folder."""
    for name, found in _made(folder):
        (DATA / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=0) + b"\n")
        print(f"{name}: {found.requests:,} requests in {found.span_s:g} s, cv {found.cv:g}")


if __name__ == "__main__":
    typer.run(main)
