"""The two-sample Kolmogorov-Smirnov test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64] | NDArray[np.int64]
EXACT = 200
"""Values of either set up to which the p-value is computed exactly; beyond, the limit differs from it by nothing."""


def kolmogorov_smirnov(a: Values, b: Values) -> tuple[float, float]:
    """The largest difference between the shares of both sets up to any value, and its p-value; shapes [n] and [m]."""
    from scipy.stats import ks_2samp

    test = ks_2samp(a, b, method="exact" if max(len(a), len(b)) <= EXACT else "asymp")
    return float(test.statistic), float(test.pvalue)
