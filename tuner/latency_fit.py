"""A linear latency from samples with outliers: coefficients are never negative, so more work never takes less time."""

from typing import NamedTuple

import numpy as np
from sklearn.linear_model import LinearRegression

from tuner.workload import Floats

TRUSTING_ROUNDS = 3
"""In which every sample counts in full: where half of them take ten times as long as the others, neither half is wrong,
and what matters is their mean."""
CAUTIOUS_ROUNDS = 20
"""At most, in which no sample is left out, only weighed less: rare sizes that are far from what was believed move the
coefficients until they fit, before anything is taken for an outlier."""
ROUNDS = 6
"""At most, in which samples far off are left out."""

LEAST_SPREAD = 0.005
"""Relative; emulated engines have no noise at all, which would make anything an outlier."""

BELIEVED_SPREAD = 0.3
"""Relative; of few samples, those much farther from what was believed than this are taken for outliers."""

HUBER = 1.345
BISQUARE = 4.685
SETTLED = 1e-3


class Fit(NamedTuple):
    coefficients: Floats
    spread: float
    """Relative standard deviation of a sample around the fit, outliers aside."""
    covariance: Floats
    """Of the coefficients."""


def robust_fit(x: Floats, seconds: Floats, weights: Floats, start: Floats, prior: tuple[Floats, Floats, Floats]) -> Fit:
    """Least relative squares, outliers given less and less weight, all coefficients at least 0.

    `x` is `(n, k)`; `start` are first coefficients; `prior` is `x`, seconds and weights of pseudo-observations, which
    are never taken for outliers.
    """
    scale = np.maximum(np.max(np.concatenate([x, prior[0]]), axis=0), 1e-12)
    both_x, both_s = np.concatenate([x, prior[0]]) / scale, np.concatenate([seconds, prior[1]])
    coefficients = start * scale
    for trust_of, rounds in ((np.ones_like, TRUSTING_ROUNDS), (_huber, CAUTIOUS_ROUNDS), (_bisquare, ROUNDS)):
        for _ in range(rounds):
            expected = np.maximum(both_x @ coefficients, 1e-9)
            residuals = (both_s / expected - 1)[: len(x)]
            sizes, mass = np.append(np.abs(residuals), BELIEVED_SPREAD), np.append(weights, prior[2].sum())
            spread = max(LEAST_SPREAD, 1.4826 * _weighted_median(sizes, mass))
            trust = weights * trust_of(np.abs(residuals) / spread)
            precision = np.concatenate([trust, prior[2]]) / expected**2
            before, coefficients = coefficients, _positive(both_x, both_s, precision)
            if np.allclose(before, coefficients, rtol=SETTLED, atol=1e-12):
                break
    information = (both_x * precision[:, None]).T @ both_x
    covariance = spread**2 * np.linalg.pinv(information, hermitian=True)
    return Fit(coefficients / scale, spread, covariance / np.outer(scale, scale))


def _positive(x: Floats, seconds: Floats, precision: Floats) -> Floats:
    model = LinearRegression(positive=True, fit_intercept=False)
    return np.asarray(model.fit(x, seconds, sample_weight=precision / precision.max()).coef_, dtype=np.float64)


def _huber(far: Floats) -> Floats:
    """Weights of samples so many spreads off: they never reach 0."""
    return np.asarray(np.minimum(1.0, HUBER / np.maximum(far, 1e-12)))


def _bisquare(far: Floats) -> Floats:
    """Tukey's, which do."""
    return np.asarray(np.maximum(0.0, 1 - (far / BISQUARE) ** 2) ** 2)


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    mass = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(mass, mass[-1] / 2)])
