"""What has happened until an instant: sums and histograms of dated amounts, as arrays with answers at any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Counted:
    """A sum that grows: amounts that are added at instants."""

    def __init__(self, times_ns: Int64s, amounts: Int64s | None = None) -> None:
        """Arrays [n] in any order; without amounts each counts one."""
        order = np.argsort(times_ns, kind="stable")
        self._times = times_ns[order]
        added = np.ones(len(order), dtype=np.int64) if amounts is None else amounts[order]
        self._totals = np.concatenate([[0], np.cumsum(added)])

    def until(self, at_ns: float) -> int:
        """Everything up to and including an instant."""
        return int(self._totals[np.searchsorted(self._times, at_ns, side="right")])


class HistogramState(NamedTuple):
    """Of the samples so far."""

    counts: list[int]
    """Of each bucket alone, the last one without an upper bound."""
    total: float
    """The sum of all samples."""


class Sampled:
    """A histogram that grows. Samples and bounds are whole numbers of the same unit, so that none falls between two."""

    def __init__(
        self,
        times_ns: Int64s,
        values: Int64s,
        bounds: Sequence[float],
        *,
        scale: int = 1,
        weights: Int64s | None = None,
    ) -> None:
        """Arrays [n] in any order. `bounds`: upper bounds (a sample on one is within) in `scale` units of the samples:
        seconds have a scale of 1e9. `weights`: how often each sample stands (once by default).
        """
        order = np.argsort(times_ns, kind="stable")
        self.bounds = list(bounds)
        self._times, self._scale = times_ns[order], scale
        edges = np.rint(np.array(bounds, dtype=np.float64) * scale).astype(np.int64)
        # As narrow as can be: there may be one for each of many millions of steps.
        self._buckets = np.searchsorted(edges, values[order]).astype(np.uint8)
        self._weights = None if weights is None else weights[order]
        amounts = values[order] if weights is None else values[order] * weights[order]
        self._totals = np.concatenate([[0], np.cumsum(amounts)])

    def until(self, at_ns: float) -> HistogramState:
        """Of the samples up to and including an instant."""
        seen = int(np.searchsorted(self._times, at_ns, side="right"))
        weights = None if self._weights is None else self._weights[:seen]
        counts = np.bincount(self._buckets[:seen], weights, minlength=len(self.bounds) + 1)
        return HistogramState(counts.astype(np.int64).tolist(), int(self._totals[seen]) / self._scale)


class Held:
    """A value that holds from an instant to the next one; 0 before the first."""

    def __init__(self, times_ns: Int64s, values: NDArray[np.float64] | Int64s) -> None:
        """Arrays [n], times in ascending order."""
        self._times, self._values = times_ns, values

    def at(self, at_ns: float) -> float:
        place = int(np.searchsorted(self._times, at_ns, side="right"))
        return float(self._values[place - 1]) if place else 0.0
