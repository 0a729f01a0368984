"""Quantiles of numbers as a model file holds them: probability -> value, linear in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import AfterValidator, Field

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.model_part import MAX_LISTED, Share
from servetwin.workloads.observed_lengths import PERCENTILES, QuantileGrid

DIGITS = 6
"""Significant ones of a quantile."""


def _checked(quantiles: dict[float, float]) -> dict[float, float]:
    grid = dict(sorted(quantiles.items()))
    if not grid or min(grid) != 0 or max(grid) != 1:
        raise ValueError("must run from probability 0 to 1")
    if (np.diff([*grid.values()]) < 0).any():
        raise ValueError("must never fall")
    return grid


Quantiles = Annotated[
    dict[Share, Annotated[float, Field(ge=0)]], AfterValidator(_checked), Field(max_length=MAX_LISTED)
]


ShareQuantiles = Annotated[dict[Share, Share], AfterValidator(_checked), Field(max_length=MAX_LISTED)]
"""Of numbers from 0 to 1."""


def _checked_tokens(quantiles: dict[float, float]) -> dict[float, float]:
    QuantileGrid(quantiles)
    return quantiles


TokenQuantiles = Annotated[Quantiles, AfterValidator(_checked_tokens)]
"""Of lengths in tokens: 1 or more."""


def quantiles_of(values: ArrayLike, probabilities: Sequence[float] = PERCENTILES) -> dict[float, float]:
    """Quantiles of observed numbers, shape [n], n at least 1: by default percentiles and some more of the tail.

    probabilities: from 0 to 1, ascending. Those that lie on the line between their neighbours are left out.
    """
    at = np.quantile(np.asarray(values, dtype=np.float64), probabilities).tolist()
    rounded = [float(f"{value:.{DIGITS}g}") for value in at]
    slopes = np.diff(rounded) / np.diff(probabilities)
    bends = [True, *(~np.isclose(slopes[1:], slopes[:-1], rtol=1e-3)).tolist(), True]
    return {p: v for p, v, kept in zip(probabilities, rounded, bends, strict=True) if kept}


def values_at(quantiles: dict[float, float], p: FloatArray) -> FloatArray:
    """The number that a share p does not exceed, shape as `p`."""
    return np.interp(p, [*quantiles], [*quantiles.values()])
