"""A linear latency from samples with outliers: coefficients are never negative, so more work never takes less time."""

from typing import NamedTuple

import numpy as np
from sklearn.linear_model import LinearRegression

from tuner.workload import Floats

ROUNDS = 8
CAUTIOUS_ROUNDS = 2
"""Rounds in which no sample is left out yet, only weighed less: the first coefficients may be far off."""

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
    for round_ in range(ROUNDS):
        expected = np.maximum(both_x @ coefficients, 1e-9)
        residuals = (both_s / expected - 1)[: len(x)]
        sizes, mass = np.append(np.abs(residuals), BELIEVED_SPREAD), np.append(weights, prior[2].sum())
        spread = max(LEAST_SPREAD, 1.4826 * _weighted_median(sizes, mass))
        trust = weights * _trust(residuals / spread, cautious=round_ < CAUTIOUS_ROUNDS)
        precision = np.concatenate([trust, prior[2]]) / expected**2
        before, coefficients = coefficients, _positive(both_x, both_s, precision)
        if round_ > CAUTIOUS_ROUNDS and np.allclose(before, coefficients, rtol=SETTLED, atol=1e-12):
            break
    information = (both_x * precision[:, None]).T @ both_x
    covariance = spread**2 * np.linalg.pinv(information, hermitian=True)
    return Fit(coefficients / scale, spread, covariance / np.outer(scale, scale))


def _positive(x: Floats, seconds: Floats, precision: Floats) -> Floats:
    model = LinearRegression(positive=True, fit_intercept=False)
    return np.asarray(model.fit(x, seconds, sample_weight=precision / precision.max()).coef_, dtype=np.float64)


def _trust(deviations: Floats, *, cautious: bool) -> Floats:
    """Weights of samples so many spreads off: Huber's never reach 0, Tukey's do."""
    far = np.abs(deviations)
    if cautious:
        return np.minimum(1.0, HUBER / np.maximum(far, 1e-12))
    return np.asarray(np.maximum(0.0, 1 - (far / BISQUARE) ** 2) ** 2)


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    mass = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(mass, mass[-1] / 2)])
