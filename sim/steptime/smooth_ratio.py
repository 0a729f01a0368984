"""What a physical model falls short of, smoothed over the space of shapes: a Gaussian process, fitted by scikit-learn.

The process learns from the measurements how far a deviation reaches along each coordinate and how much of it is noise.
Away from what was measured it goes back to nothing. What it needs afterwards are plain numbers, which a profile keeps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SQRT5 = float(np.sqrt(5))
NOISE = (1e-4, 0.1)
"""Variance of the logarithm of a measured time: from 1 to about 30 %."""
SCALES = (0.5, 50.0)
"""Of a coordinate: from steps half as far as a factor of e to everywhere the same."""
VARIANCE = (1e-4, 0.25)


class FitExtraMissingError(ValueError):
    """scikit-learn is not installed."""


@dataclass(frozen=True)
class SmoothRatio:
    """The mean of the process (Matern kernel of smoothness 5/2, one length scale a coordinate)."""

    centres: tuple[tuple[float, ...], ...]
    """Measured places [m, coordinates] ..."""
    weights: tuple[float, ...]
    """... and their weights [m]."""
    length_scales: tuple[float, ...]
    variance: float
    """Of the process; its standard deviation says by what factor, as a logarithm, the physical model is off."""
    noise: float
    """Variance of the logarithms of what was found at the places around it."""

    def __post_init__(self) -> None:
        lengths = {len(centre) for centre in self.centres} | {len(self.length_scales)}
        if len(lengths) != 1 or len(self.weights) != len(self.centres):
            raise ValueError("centres, weights and length_scales must fit together")
        if not np.isfinite([*self.weights, *self.length_scales, self.variance, self.noise]).all():
            raise ValueError("weights, length_scales, variance and noise must be finite")

    @classmethod
    def fit(cls, places: Floats, log_ratios: Floats) -> SmoothRatio:
        """From places [m, coordinates] and what was found there [m]. Raises FitExtraMissingError."""
        try:
            from sklearn.exceptions import ConvergenceWarning
            from sklearn.gaussian_process import GaussianProcessRegressor
            from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
        except ModuleNotFoundError as e:
            raise FitExtraMissingError(
                "a fit of whole steps needs scikit-learn: pip install 'servetwin[fit]'"
            ) from e
        scales = np.full(places.shape[1], 3.0)
        kernel = ConstantKernel(0.02, VARIANCE) * Matern(scales, SCALES, nu=2.5) + WhiteKernel(4e-3, NOISE)
        process = GaussianProcessRegressor(kernel, alpha=1e-9)
        with warnings.catch_warnings():
            # A length at its bound says that a coordinate does not matter, or noise that there is none.
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(places, log_ratios)
        constant, matern, white = process.kernel_.k1.k1, process.kernel_.k1.k2, process.kernel_.k2
        fitted = cls(
            tuple(map(tuple, places.tolist())),
            (0.0,) * len(places),
            tuple(matern.length_scale.tolist()),
            float(constant.constant_value),
            float(white.noise_level),
        )
        return fitted._weighted(log_ratios)

    def _weighted(self, log_ratios: Floats) -> SmoothRatio:
        """The same with the weights of these observations."""
        covariance = self._covariance(self._scaled_centres) + self.noise * np.eye(len(log_ratios))
        weights = np.linalg.solve(covariance, log_ratios)
        return SmoothRatio(
            self.centres, tuple(weights.tolist()), self.length_scales, self.variance, self.noise
        )

    def __call__(self, places: Floats) -> Floats:
        """Logarithms of the ratio, [n], at places [n, coordinates]."""
        found: Floats = self._covariance(places / self._scales) @ self._weights
        return found

    # Asked for step by step: made once.

    @cached_property
    def _scales(self) -> Floats:
        return np.array(self.length_scales, dtype=np.float64)

    @cached_property
    def _weights(self) -> Floats:
        return np.array(self.weights, dtype=np.float64)

    @cached_property
    def _scaled_centres(self) -> Floats:
        scaled: Floats = np.array(self.centres, dtype=np.float64) / self._scales
        return scaled

    def _covariance(self, scaled: Floats) -> Floats:
        from scipy.spatial.distance import cdist

        r: Floats = SQRT5 * cdist(scaled, self._scaled_centres)
        return self.variance * (1 + r + r * r / 3) * np.exp(-r)


def merged(places: Floats, log_ratios: Floats, most: int) -> tuple[Floats, Floats]:
    """(places, medians): at most `most` places, each with the median of the measurements around it."""
    distinct, which = np.unique(np.round(places, 2), axis=0, return_inverse=True)
    which = which.ravel()
    if len(distinct) > most:
        from scipy.cluster.vq import kmeans2

        distinct, which = kmeans2(places, most, minit="++", rng=0)
    kept = np.unique(which)
    medians = np.array([np.median(log_ratios[which == i]) for i in kept])
    return distinct[kept], medians
