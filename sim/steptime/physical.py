"""Non-negative sums of physical terms, fitted to measured times by relative error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROUNDS = 8
"""Of reweighting, after which the weights no longer move."""
LEAST_ERROR = 0.02
"""Relative errors below this count alike, so that a few exact rows do not rule the fit."""


@dataclass(frozen=True)
class PhysicalModel:
    """time = sum of weight x term, weights 0 or more: more work never takes less time."""

    weights: Floats
    """[terms], in the unit of the times per unit of each term."""

    @classmethod
    def fit(cls, terms: Floats, times: Floats, importance: Floats | None = None) -> PhysicalModel:
        """The weights with the least squared relative error. `terms` [n, terms], `times` [n], above 0.

        `importance` [n]: how much a row's squared error counts (default: all alike).
        """
        from scipy.optimize import nnls

        root = np.ones(len(times)) if importance is None else np.sqrt(importance)
        # Terms of like size: the solver's tolerance is an absolute one.
        relative = terms * (root / times)[:, None]
        size = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)
        weights, _ = nnls(relative / size, root)
        return cls(weights / size)

    @classmethod
    def fit_robust(cls, terms: Floats, times: Floats, importance: Floats | None = None) -> PhysicalModel:
        """The same for times among which some are far too long, as where a machine does other things in between.

        The least absolute relative error, by iterated reweighting.
        """
        importance = np.ones(len(times)) if importance is None else importance
        model = cls.fit(terms, times, importance)
        for _ in range(ROUNDS):
            error = np.abs(model(terms) / times - 1)
            model = cls.fit(terms, times, importance / np.maximum(error, LEAST_ERROR))
        return model

    def __call__(self, terms: Floats) -> Floats:
        """[n]"""
        times: Floats = terms @ self.weights
        return times
