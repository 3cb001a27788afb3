"""The files of traces as workloads, whole and at their own pace.

Azure's requests share nothing. Mooncake's name their 512-token blocks; see `sessions`.
"""

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.traces.sessions import BLOCK_TOKENS, sessions_of
from tuner.slo import DEFAULT_CLASS
from tuner.workload import Floats, Ints, Workload

MOONCAKE = ".jsonl"
MOONCAKE_STEP_S = 3.0
"""Times in Mooncake's trace are rounded to this."""


class TraceError(ValueError):
    """A file that is no trace; the message says which and why."""


class MooncakeRequest(msgspec.Struct, frozen=True):
    """A line of Mooncake's trace."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


def read_trace(file: Path, seed: int) -> Workload:
    """All requests of a file. The seed spreads those that the trace has at the same rounded time.

    Raises `TraceError`, or `OSError` if the file cannot be read.
    """
    try:
        return read_mooncake(file, seed) if file.suffix == MOONCAKE else read_azure(file)
    except (LookupError, UnicodeDecodeError, ValueError, msgspec.DecodeError) as error:
        raise TraceError(f"{file.name}: {error!r}") from error


def read_azure(file: Path) -> Workload:
    """`TIMESTAMP, ContextTokens, GeneratedTokens`; every request is a session of its own."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    # Seven decimals of seconds are one more than Python reads.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    at_s = np.array([(time - times[0]).total_seconds() for time in times])
    prompt = np.array([int(row["ContextTokens"]) for row in rows], dtype=np.int64)
    output = np.array([int(row["GeneratedTokens"]) for row in rows], dtype=np.int64)
    return in_order(at_s, prompt, output, np.arange(len(rows)), root_tokens=0)


def read_mooncake(file: Path, seed: int) -> Workload:
    """Every prompt begins with the same block, which is the root of all sessions."""
    rows = mooncake_rows(file)
    rng = np.random.default_rng(seed)
    at_s = np.array([row.timestamp / 1e3 for row in rows]) + rng.uniform(0, MOONCAKE_STEP_S, size=len(rows))
    prompt = np.array([row.input_length for row in rows], dtype=np.int64)
    output = np.array([row.output_length for row in rows], dtype=np.int64)
    session = sessions_of([row.hash_ids for row in rows], prompt)
    return in_order(at_s, prompt, output, session, root_tokens=BLOCK_TOKENS)


def mooncake_rows(file: Path) -> list[MooncakeRequest]:
    return msgspec.json.Decoder(MooncakeRequest).decode_lines(file.read_bytes())


def in_order(at_s: Floats, prompt: Ints, output: Ints, session: Ints, root_tokens: int) -> Workload:
    """A workload of one class, in which all sessions share a root of so many tokens."""
    order = np.argsort(at_s, kind="stable")
    begin_s = float(at_s[order[0]]) if len(order) else 0.0
    arrived_s = at_s[order] - begin_s
    return Workload(
        # The last request comes as long before the end as any one comes before the next.
        span_s=float(arrived_s[-1]) * len(order) / max(1, len(order) - 1) if len(order) > 1 else 1.0,
        classes=(DEFAULT_CLASS,),
        arrived_s=arrived_s,
        prompt_tokens=np.maximum(1, prompt[order]),
        output_tokens=np.maximum(1, output[order]),
        slo_class=np.zeros(len(order), dtype=np.int64),
        session=session[order].astype(np.int64),
        root=np.zeros(len(order), dtype=np.int64),
        root_tokens=np.full(len(order), root_tokens, dtype=np.int64),
    )
