"""One latency of one engine kind: its samples, the fit to them, and how far off its predictions were."""

import enum
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from engines.emulated.profile import Profile
from tuner.latency_fit import Fit, robust_fit
from tuner.latency_samples import Sample, Samples
from tuner.workload import Floats

HALF_LIFE_S = 3600.0
"""Age, behind the newest sample, at which one counts half."""
ERRORS = 500
"""Predictions that the visible error is about."""
STORED_ROWS = 300
"""Samples that a new leader gets."""
SURE = 1.645
"""Standard deviations on either side that hold nine tenths."""
UNSURE = 2.0
"""Factor on either side of what is only believed."""


class Latency(enum.StrEnum):
    PREFILL = "prefill"
    """In 1, new tokens, context product."""
    DECODE = "decode"
    """In 1, batch, KV tokens."""
    TRANSFER = "transfer"
    """In 1, bytes × concurrent transfers."""


class Estimate(NamedTuple):
    """Seconds, with bounds that hold nine samples in ten."""

    seconds: float
    low_s: float
    high_s: float


class ModelError(NamedTuple):
    """How far predictions were off from what then happened, relative to what happened."""

    samples: int
    """That the model can be fitted to now."""
    checked: int
    """Predictions, each made before its sample was known. The others are 0 while there is none."""
    mape: float
    p50: float
    p90: float
    bias: float
    """Median of (predicted − actual) / actual; above 0: things go faster than predicted."""


class Prior(NamedTuple):
    """What is believed of a latency: coefficients, and pseudo-observations at `anchors` worth `weight` samples."""

    coefficients: Floats
    anchors: Floats
    weight: float


class StoredModel(msgspec.Struct):
    samples: list[Sample]
    errors: list[float]


class LatencyModel:
    """Bounded in memory. Samples given to it are finite and not negative, their seconds above 0."""

    def __init__(self, latency: Latency) -> None:
        self._latency = latency
        self._samples = Samples()
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._fit: Fit | None = None
        self._stale = False

    def learn(self, samples: Sequence[Sample], prior: Prior | None) -> None:
        """Check what was predicted for these samples, then keep them for the next fit."""
        if not samples:
            return
        if prior is not None:
            table = np.array(samples, dtype=np.float64)
            predicted = regressors(self._latency, table) @ self.coefficients(prior)
            self._errors.extend((predicted / table[:, 2] - 1).tolist())
        self._samples.add(samples)
        self._stale = True

    def refit(self, prior: Prior) -> None:
        """Fit anew if there is anything new. With few samples, the prior gives the shape and they the level."""
        if not self._stale:
            return
        self._stale = False
        table = self._samples.table()
        x, seconds = regressors(self._latency, table), table[:, 2]
        weights = np.exp2((table[:, 3] - table[:, 3].max()) / HALF_LIFE_S)
        doubt = prior.weight / (len(table) + prior.weight)
        ratios = np.log(seconds / np.maximum(x @ prior.coefficients, 1e-12))
        believed = prior.coefficients * np.exp((1 - doubt) * float(np.median(ratios)))
        # Anchors are far out, where they have much leverage: what they weigh fades faster than data come in.
        shares = np.full(len(prior.anchors), doubt * prior.weight / len(prior.anchors))
        pseudo = prior.anchors, np.maximum(prior.anchors @ believed, 1e-12), shares
        self._fit = robust_fit(x, seconds, weights, believed, pseudo)

    def coefficients(self, prior: Prior) -> Floats:
        """As fitted, else as believed. None is below 0."""
        return prior.coefficients if self._fit is None else self._fit.coefficients

    def estimate(self, first: float, second: float, prior: Prior) -> Estimate:
        """Of one sample with these regressors."""
        x = regressors(self._latency, np.array([[first, second]]))[0]
        seconds = float(x @ self.coefficients(prior))
        if self._fit is None:
            return Estimate(seconds, seconds / UNSURE, seconds * UNSURE)
        variance = (self._fit.spread * seconds) ** 2 + max(0.0, float(x @ self._fit.covariance @ x))
        error_s = SURE * float(np.sqrt(variance))
        return Estimate(seconds, max(0.0, seconds - error_s), seconds + error_s)

    def error(self) -> ModelError:
        """Over the newest predictions."""
        errors = np.array(self._errors)
        if not len(errors):
            return ModelError(len(self._samples), 0, 0.0, 0.0, 0.0, 0.0)
        sizes = np.abs(errors)
        p50, p90 = np.quantile(sizes, (0.5, 0.9))
        bias = float(np.median(errors))
        return ModelError(len(self._samples), len(errors), float(sizes.mean()), float(p50), float(p90), bias)

    def stored(self) -> StoredModel:
        """What a new leader needs, rounded."""
        samples = [_rounded(row) for row in self._samples.table(STORED_ROWS)[-STORED_ROWS:].tolist()]
        return StoredModel(samples, [float(f"{error:.3g}") for error in self._errors])

    @classmethod
    def restored(cls, latency: Latency, stored: StoredModel) -> "LatencyModel":
        model = cls(latency)
        model.learn([sample for sample in stored.samples if plausible(sample)], None)
        model._errors.extend(error for error in stored.errors if np.isfinite(error))
        return model


MAX_S = 3600.0
MAX_COUNT = 1e15


def plausible(sample: Sample) -> bool:
    """Whether a sample is one that a model may be given. False for anything with NaN."""
    first, second, seconds, at_s = sample
    return 0 <= first <= MAX_COUNT and 0 <= second <= MAX_COUNT and 1e-7 <= seconds <= MAX_S and 0 <= at_s <= MAX_COUNT


def regressors(latency: Latency, table: Floats) -> Floats:
    """`(n, k)` with the intercept in front."""
    width = 1 if latency is Latency.TRANSFER else 2
    return np.column_stack([np.ones(len(table)), table[:, :width]])


def prior_of(profile: Profile, latency: Latency, weight: float) -> Prior:
    """What a profile says of a latency, with anchors spread over what such an engine can do."""
    match latency:
        case Latency.PREFILL:
            coefficients = [profile.a_s, profile.b_s_per_token, profile.c_s_per_token2]
            anchors = _prefill_anchors(profile)
        case Latency.DECODE:
            coefficients = [profile.d_s, profile.e_s_per_sequence, profile.f_s_per_kv_token]
            anchors = _decode_anchors(profile)
        case Latency.TRANSFER:
            coefficients = [profile.g_s, 1 / profile.bandwidth_bytes_per_s]
            anchors = [(tokens * profile.kv_layout.bytes_per_token, 0.0) for tokens in (64, 512, 4096, 32_768)]
    return Prior(np.array(coefficients), regressors(latency, np.array(anchors, dtype=np.float64)), weight)


def _prefill_anchors(profile: Profile) -> list[tuple[float, float]]:
    """Prompts up to a whole chunk, alone and behind half a context."""
    largest = max(32, profile.chunked_prefill_tokens)
    sizes = [largest / 64, largest / 16, largest / 4, largest]
    return [(n, n * (before + n / 2)) for n in sizes for before in (0, profile.context_length_tokens / 2)]


def _decode_anchors(profile: Profile) -> list[tuple[float, float]]:
    """Batches up to the largest, of short and of long sequences."""
    batches = [1, 8, 32, profile.max_running]
    return [(n, n * kept) for n in batches for kept in (128, min(2048, profile.context_length_tokens / 2))]


def _rounded(row: list[float]) -> Sample:
    first, second, seconds, at_s = row
    return float(f"{first:.6g}"), float(f"{second:.6g}"), float(f"{seconds:.6g}"), round(at_s, 1)
