"""Non-negative sums of physical terms, fitted to measured times by relative error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PhysicalModel:
    """time = sum of weight x term, weights 0 or more: more work never takes less time."""

    weights: Floats
    """[terms], in the unit of the times per unit of each term."""

    @classmethod
    def fit(cls, terms: Floats, times: Floats) -> PhysicalModel:
        """The weights with the least squared relative error. `terms` [n, terms], `times` [n], above 0."""
        from scipy.optimize import nnls

        # Terms of like size: the solver's tolerance is an absolute one.
        relative = terms / times[:, None]
        size = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)
        weights, _ = nnls(relative / size, np.ones(len(times)))
        return cls(weights / size)

    def __call__(self, terms: Floats) -> Floats:
        """[n]"""
        times: Floats = terms @ self.weights
        return times
