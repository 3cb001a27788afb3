"""What traffic is like, in a dozen numbers: to tell whether it moved, and which past traffic was similar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tuner.workload import Floats, Ints, Workload

FEW = 3
"""Arrivals below which burstiness is not a measurement; it is then that of a Poisson process."""

NAMES = (
    "rate",
    "burstiness",
    "prompt_mean",
    "prompt_p50",
    "prompt_p90",
    "output_mean",
    "output_p50",
    "output_p90",
    "cached_share",
    "session_share",
    "root_share",
)
"""The components of `Features.as_vector`, in order; behind them one `class:NAME` for each class."""


@dataclass(frozen=True, slots=True)
class Features:
    """Tokens are per request. Everything is 0 (burstiness 1) for a workload without requests."""

    requests: int
    span_s: float
    rate_rps: float
    burstiness: float
    """Squared coefficient of variation of the times between arrivals: 1 for Poisson, more for bursts, 0 for a clock."""
    prompt_mean_tokens: float
    prompt_p50_tokens: float
    prompt_p90_tokens: float
    output_mean_tokens: float
    output_p50_tokens: float
    output_p90_tokens: float
    cached_share: float
    """Share of all prompt tokens that one endless context cache would already hold."""
    session_share: float
    """Share of requests that extend an earlier prompt of this workload."""
    root_share: float
    """Share of all prompt tokens that lie in a root seen before and in no earlier prompt of the session."""
    class_mix: Mapping[str, float] = field(default_factory=dict)
    """Share of requests by class; classes without requests have 0."""

    def as_vector(self, classes: Sequence[str] = ()) -> Floats:
        """Components as `names(classes)`, scaled so that differences compare: 0.1 is about a tenth of anything.

        Rates, lengths and burstiness are logarithms (a floor keeps zeros finite), shares are themselves.
        """
        logs = np.log(
            [
                self.rate_rps + 0.01,
                self.burstiness + 0.1,
                self.prompt_mean_tokens + 1,
                self.prompt_p50_tokens + 1,
                self.prompt_p90_tokens + 1,
                self.output_mean_tokens + 1,
                self.output_p50_tokens + 1,
                self.output_p90_tokens + 1,
            ]
        )
        shares = [self.cached_share, self.session_share, self.root_share]
        return np.array([*logs, *shares, *(self.class_mix.get(name, 0.0) for name in classes)])


def names(classes: Sequence[str] = ()) -> tuple[str, ...]:
    """What each component of `as_vector(classes)` is."""
    return (*NAMES, *(f"class:{name}" for name in classes))


def distance(one: Features, other: Features) -> float:
    """How unlike two traffics are: root mean square over the components of their vectors; 0 is the same."""
    classes = sorted({*one.class_mix, *other.class_mix})
    difference = one.as_vector(classes) - other.as_vector(classes)
    return float(np.sqrt(np.mean(difference**2)))


def features(workload: Workload) -> Features:
    """The features of a workload; a pass or two over its columns."""
    prompt, output = _three(workload.prompt_tokens), _three(workload.output_tokens)
    by_session = session_cached_tokens(workload)
    by_root = root_cached_tokens(workload)
    cached = np.maximum(by_session, by_root)
    tokens = max(1, int(workload.prompt_tokens.sum()))
    return Features(
        requests=len(workload),
        span_s=workload.span_s,
        rate_rps=workload.rate_rps,
        burstiness=burstiness(workload.arrived_s),
        prompt_mean_tokens=prompt[0],
        prompt_p50_tokens=prompt[1],
        prompt_p90_tokens=prompt[2],
        output_mean_tokens=output[0],
        output_p50_tokens=output[1],
        output_p90_tokens=output[2],
        cached_share=float(cached.sum() / tokens),
        session_share=float(np.count_nonzero(by_session) / max(1, len(workload))),
        root_share=float((cached - by_session).sum() / tokens),
        class_mix=_mix(workload),
    )


def burstiness(arrived_s: Floats) -> float:
    """Squared coefficient of variation of the times between arrivals, given in order."""
    gaps_s = np.diff(arrived_s)
    if len(gaps_s) < FEW or not (mean_s := float(gaps_s.mean())):
        return 1.0
    return float(gaps_s.var() / mean_s**2)


def session_cached_tokens(workload: Workload) -> Ints:
    """For each request, the tokens that the prompt before it in its session, and that one's answer, share with it."""
    before = _previous_of(workload.session)
    held = (workload.prompt_tokens + workload.output_tokens)[before]
    shared = np.minimum(held, workload.prompt_tokens - 1)
    return np.where(before >= 0, np.maximum(shared, 0), 0)


def root_cached_tokens(workload: Workload) -> Ints:
    """For each request, the tokens of its root if an earlier request had the same."""
    seen = (_previous_of(workload.root) >= 0) & (workload.root_tokens > 0)
    return np.where(seen, np.clip(workload.prompt_tokens - 1, 0, workload.root_tokens), 0)


def _previous_of(group: Ints) -> NDArray[np.intp]:
    """For each row, the row before it in the same group; −1 for the first."""
    order = np.argsort(group, kind="stable")
    same = np.zeros(len(group), dtype=bool)
    same[1:] = np.diff(group[order]) == 0
    previous = np.full(len(group), -1, dtype=np.intp)
    previous[order[1:]] = np.where(same[1:], order[:-1], -1)
    return previous


def _three(tokens: Ints) -> tuple[float, float, float]:
    """Mean, median and 90th percentile."""
    if not len(tokens):
        return 0.0, 0.0, 0.0
    p50, p90 = np.quantile(tokens, (0.5, 0.9))
    return float(tokens.mean()), float(p50), float(p90)


def _mix(workload: Workload) -> dict[str, float]:
    counts = np.bincount(workload.slo_class, minlength=len(workload.classes))
    return {name: float(counts[at] / max(1, len(workload))) for at, name in enumerate(workload.classes)}
