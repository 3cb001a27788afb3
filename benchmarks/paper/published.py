"""What was published and what is run, read from the TOML files beside this module."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from benchmarks.adapt.scenarios import Count, Data, Lengths, Positive, Share, read
from engines.emulated.profile import Profile, load_profile, profile_names
from engines.types import Role

FOLDER = Path(__file__).parent
PROFILES = FOLDER / "profiles"

PATTERNS = ("data_parallel", "disaggregated", "balanced", "tp8")
TITLES = {
    "data_parallel": "data parallel",
    "disaggregated": "disaggregated",
    "balanced": "balanced 0.1",
    "tp8": "one TP 8 engine",
}
METRICS = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "jct_mean_s", "jct_p99_s")

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Curve = Sequence[float]
"""One value a rate."""


class Hardware(Data, frozen=True):
    """One set of latency coefficients to run the MicroServing evaluation on."""

    title: str
    tp4: str
    tp8: str
    """Names of profiles."""
    overhead_s: NotNegative
    """Added to every TTFT and JCT after the simulation: time outside engines and links."""
    note: str


class TextClaims(Data, frozen=True):
    """Shares by which something is said to be lower."""

    tp8_mean_jct: Share
    disaggregated_mean_jct: Share
    disaggregated_p99_jct: Share


class Microserving(Data, frozen=True):
    """The evaluation of LLM MicroServing. Curves are by pattern and metric, one value for each of `rates_rps`."""

    source: str
    rates_rps: Annotated[Curve, msgspec.Meta(min_length=2)]
    requests: Count
    """Measured, after `warm_up` that are not."""
    warm_up: int
    prompt_tokens: Count
    output_tokens: Count
    spread_tokens: NotNegative
    """Standard deviation of both."""
    offload_ratio: Share
    chunked_prefill_tokens: Count
    mixed_chunk: bool
    pixel: Mapping[str, float]
    """By metric: what one pixel of the published figure is worth."""
    text: TextClaims
    hardware: Mapping[str, Hardware]
    published: Mapping[str, Mapping[str, Curve]]


class Dataset(Data, frozen=True):
    """Lengths of one dataset's requests: distributions of this project's choosing with published means."""

    title: str
    mean_prompt_tokens: Positive
    mean_output_tokens: Positive
    most_tokens: Count
    """Of prompt and output together."""
    too_long: Literal["drop", "cut"]
    prompt: Lengths
    output: Lengths
    note: str


class PlacedEngine(Data, frozen=True):
    """One engine of a system."""

    profile: str
    role: Role = Role.MIXED


class System(Data, frozen=True):
    """A way to serve. `chunked_prefill_tokens` absent: as the profile says."""

    name: str
    kind: Literal["disaggregated", "late", "baseline", "same_kernels", "chunked", "other"]
    """`disaggregated` and `baseline` are the published ones; `late` is the first with its first token from decode."""
    note: str
    engines: Annotated[Sequence[PlacedEngine], msgspec.Meta(min_length=1)]
    chunked_prefill_tokens: Count | None = None
    mixed_chunk: bool = False
    answers_first: Literal["prefill", "decode"] = "decode"
    """Which engine of a disaggregated system answers with the first token."""

    @property
    def gpus(self) -> int:
        return sum(find_profile(engine.profile).kv_layout.tensor_parallel for engine in self.engines)


class Attained(Data, frozen=True):
    """Share of requests within both bounds, by rate per GPU."""

    rates_rps: Curve
    shares: Curve


class PublishedGoodput(Data, frozen=True):
    """Requests a second and GPU, and the ratios of disaggregated to baseline."""

    disaggregated_rps: Positive
    baseline_rps: Positive
    rate_gain: Positive
    slo_gain: Positive
    """How much tighter bounds may be at the same rate."""
    baseline_attained: Attained | None = None
    """Where it was printed."""


class Comparison(Data, frozen=True):
    """One row of DistServe's evaluation."""

    name: str
    lengths: str
    ttft_s: Positive
    tpot_s: Positive
    slo_rate_rps: Positive
    """Rate per GPU at which the tightest bounds are compared."""
    published: PublishedGoodput
    systems: Annotated[Sequence[System], msgspec.Meta(min_length=2)]


class DistServe(Data, frozen=True):
    """DistServe's evaluation."""

    source: str
    attainment: Share
    lengths: Mapping[str, Dataset]
    comparisons: Sequence[Comparison]


def published_rps(comparison: Comparison, kind: str) -> float | None:
    """Goodput of a kind of system; `None` where none was published."""
    published = comparison.published
    return {"disaggregated": published.disaggregated_rps, "baseline": published.baseline_rps}.get(kind)


Reasons = Mapping[str, Mapping[str, str]]
"""Group of claims -> key of the claim -> why it is not reproduced."""


def load_microserving() -> Microserving:
    """Raises `ScenarioError` for a file that is wrong."""
    return read(FOLDER / "tables" / "microserving.toml", Microserving)


def load_distserve() -> DistServe:
    """Raises `ScenarioError` for a file that is wrong."""
    return read(FOLDER / "tables" / "distserve.toml", DistServe)


def load_reasons() -> Reasons:
    """Raises `ScenarioError` for a file that is wrong."""
    return read(FOLDER / "tables" / "reasons.toml", dict[str, Mapping[str, str]])


def find_profile(name: str) -> Profile:
    """One of this package's or one that ships with the engines. Raises `ProfileError`."""
    return load_profile(name if name in profile_names() else str(PROFILES / f"{name}.toml"))
