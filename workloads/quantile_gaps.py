"""Arrivals with independent gaps of any distribution, given by quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.checks import check_count, check_positive
from servetwin.workloads.streams import arrival_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileGaps:
    """One request per second on average: gaps by their quantiles, linear in between, divided by their mean."""

    quantiles: Mapping[float, float]
    """Probability, from 0 to 1 -> gap in any unit, never falling, 0 or more."""

    def __post_init__(self) -> None:
        check_positive("quantiles: their mean", self._mean)

    @property
    def _mean(self) -> float:
        return float(np.trapezoid([*self.quantiles.values()], [*self.quantiles]))

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        share = arrival_stream(None, rng).random(n)
        gaps: FloatArray = np.interp(share, [*self.quantiles], [*self.quantiles.values()])
        return gaps.cumsum() / self._mean
