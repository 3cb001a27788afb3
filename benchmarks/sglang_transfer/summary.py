"""The figures of `sglang-transfer` as tables and goals."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from benchmarks.machine import versions
from benchmarks.real_engines import PACKAGES
from benchmarks.report import Report, Section, at_least, at_most, number
from engines.types import EngineInfo

SHARE_OF_RAW = 0.8
CONTROL_MS = 15.0
MB = 1e6


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request in three calls. Wall seconds of each call, and what the engines say they spent inside."""

    tokens: int
    bytes: int
    transfer_s: float
    """From the last token's KV being there until the receiver held it all."""
    prefill_s: float
    """Of the sender, without its queue."""
    prep_recv_s: float
    remote_send_s: float
    start_generate_s: float
    generation_s: float
    """Prefill and decode of the receiver."""
    cached_tokens: int


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The same bytes without an engine."""

    nixl_s: Sequence[float]
    copy_s: Sequence[float]


def report(
    samples: Sequence[Sample], raw: Mapping[int, Raw], info: EngineInfo, seed: int, machine: Mapping[str, str]
) -> Report:
    rows = [_figures(tokens, [one for one in samples if one.tokens == tokens], raw[tokens]) for tokens in sorted(raw)]
    control = [row["control_ms"] for row in rows if row["control_ms"] is not None]
    shares = [row["share_of_nixl"] for row in rows if row["share_of_nixl"] is not None]
    return Report(
        benchmark="sglang-transfer",
        seed=seed,
        versions=versions(PACKAGES),
        machine={**machine, "engines": info.kind, "bytes a token": info.kv_layout.bytes_per_token},
        results=rows,
        goals=[
            at_least("MB/s of a transfer over MB/s of raw NIXL, worst size", min(shares, default=None), SHARE_OF_RAW),
            at_most("control time ms, median over all sizes", median(control) if control else None, CONTROL_MS),
        ],
        headline=headline(rows),
        sections=[_speed(rows), _control(rows)],
    )


def headline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the largest size that was measured."""
    largest = next((row for row in reversed(rows) if row["share_of_nixl"] is not None), None)
    if largest is None:
        return []
    return [
        f"{largest['tokens']:,} tokens of KV ({number(largest['bytes'] / MB)} MB) move at "
        f"{number(largest['mb_per_s'])} MB/s, {largest['share_of_nixl']:.0%} of NIXL alone; the three calls cost "
        f"{number(largest['control_ms'])} ms beside computing and the bytes"
    ]


def _figures(tokens: int, samples: Sequence[Sample], raw: Raw) -> dict[str, Any]:
    size = samples[0].bytes if samples else 0
    nixl_s, copy_s = _median(raw.nixl_s), _median(raw.copy_s)
    ours = _rate(size, _median(one.transfer_s for one in samples))
    nixl = _rate(size, nixl_s)
    spent = [_control_s(one, nixl_s or 0.0) * 1000 for one in samples]
    return {
        "tokens": tokens,
        "bytes": size,
        "mb_per_s": ours,
        "nixl_mb_per_s": nixl,
        "copy_mb_per_s": _rate(size, copy_s),
        "share_of_nixl": None if ours is None or nixl is None else ours / nixl,
        "transfer_ms": _ms(one.transfer_s for one in samples),
        "nixl_ms": None if nixl_s is None else nixl_s * 1000,
        "prep_recv_ms": _ms(one.prep_recv_s for one in samples),
        "remote_send_ms": _ms(one.remote_send_s for one in samples),
        "sender_prefill_ms": _ms(one.prefill_s for one in samples),
        "start_generate_ms": _ms(one.start_generate_s for one in samples),
        "generation_ms": _ms(one.generation_s for one in samples),
        "control_ms": median(spent) if spent else None,
    }


def _control_s(sample: Sample, bytes_s: float) -> float:
    """All that three calls took, less what computes and what the bytes take with NIXL alone."""
    calls_s = sample.prep_recv_s + sample.remote_send_s + sample.start_generate_s
    return calls_s - sample.prefill_s - sample.generation_s - bytes_s


def _speed(rows: Sequence[Mapping[str, Any]]) -> Section:
    names = ("mb_per_s", "nixl_mb_per_s", "copy_mb_per_s", "share_of_nixl", "transfer_ms", "nixl_ms")
    return Section(
        title="Transfer",
        headers=["tokens", "MB", "MB/s", "NIXL alone MB/s", "memory copy MB/s", "of NIXL", "ms", "NIXL alone ms"],
        rows=[[str(row["tokens"]), number(row["bytes"] / MB), *(number(row[name]) for name in names)] for row in rows],
        notes=["Medians. A transfer ends when the receiver has put the KV into its context cache and said so."],
    )


def _control(rows: Sequence[Mapping[str, Any]]) -> Section:
    names = ("prep_recv_ms", "remote_send_ms", "sender_prefill_ms", "start_generate_ms", "generation_ms", "control_ms")
    return Section(
        title="Three calls, ms",
        headers=["tokens", "prep_recv", "remote_send", "of it prefill", "start_generate", "of it compute", "control"],
        rows=[[str(row["tokens"]), *(number(row[name]) for name in names)] for row in rows],
        notes=["Control: all three calls, less prefill and decode, less the time NIXL alone takes for the bytes."],
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _ms(values: Iterable[float]) -> float | None:
    found = _median(values)
    return None if found is None else found * 1000


def _rate(size: int, seconds: float | None) -> float | None:
    return size / MB / seconds if seconds else None
