"""Arrival times in figures: rate, burstiness, and the course of the rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

PROFILE_BINS = 100
MIN_MINUTES = 3
"""Of a span whose busiest minute is compared with the mean one."""
MINUTE_S = 60.0
MIN_FOR_IDLE = 100
"""Requests below which nothing is said about idle ends."""
IDLE_RATE, IDLE_SPAN = 0.1, 0.1
"""An end is idle where its rate is below this part of the mean, over at least this part of the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalFigures:
    """Of arrival times that are not all the same; None stands where a figure is not defined."""

    span_s: float
    """Last minus first arrival."""
    rate_per_s: float
    """Requests / span."""
    gap_cv: float
    """Standard deviation (population) of the gaps over their mean: 1 for Poisson, 0 for a constant rate."""
    dispersion_1s: float
    """Variance over mean of the requests per second, empty seconds included: 1 for Poisson."""
    peak_to_mean_minute: float | None
    """Requests of the fullest minute over 60 x rate; None below a minute."""
    bin_s: float
    requests_per_bin: tuple[int, ...]
    """The span in `PROFILE_BINS` equal parts of `bin_s` seconds."""

    @property
    def idle_head_s(self) -> float:
        """Length of a beginning with next to no requests; 0 where there is none."""
        return self._idle_s(np.array(self.requests_per_bin))

    @property
    def idle_tail_s(self) -> float:
        """Length of an end with next to no requests; 0 where there is none."""
        # The last request stands at the very end of any trace; it makes no tail busy.
        counts = np.array(self.requests_per_bin)
        counts[-1] -= 1
        return self._idle_s(counts[::-1])

    def _idle_s(self, counts: NDArray[np.int64]) -> float:
        total = counts.sum()
        if total < MIN_FOR_IDLE:
            return 0.0
        even = total * np.arange(1, len(counts) + 1) / len(counts)
        idle_bins = int(np.max(np.flatnonzero(counts.cumsum() < IDLE_RATE * even) + 1, initial=0))
        return idle_bins * self.bin_s if idle_bins >= IDLE_SPAN * len(counts) else 0.0


def arrival_figures(times_s: Times) -> ArrivalFigures | None:
    """Of sorted arrival times in seconds, shape [n]; None where they have no span."""
    span_s = float(times_s[-1] - times_s[0])
    if span_s <= 0:
        return None
    gaps = np.diff(times_s)
    seconds, minutes = (_filled_bins(times_s, width_s) for width_s in (1.0, MINUTE_S))
    rate_per_s = len(times_s) / span_s
    profile, _ = np.histogram(times_s, bins=PROFILE_BINS, range=(times_s[0], times_s[-1]))
    return ArrivalFigures(
        span_s=span_s,
        rate_per_s=rate_per_s,
        gap_cv=float(gaps.std() / gaps.mean()),
        dispersion_1s=_dispersion(seconds, bins=int(span_s) + 1),
        peak_to_mean_minute=float(minutes.max() / (MINUTE_S * rate_per_s))
        if span_s >= MIN_MINUTES * MINUTE_S
        else None,
        bin_s=span_s / PROFILE_BINS,
        requests_per_bin=tuple(profile.tolist()),
    )


def _filled_bins(times_s: Times, width_s: float) -> NDArray[np.int64]:
    """Requests in each bin that has some; the others would not fit into memory for times of decades."""
    _, counts = np.unique(np.floor((times_s - times_s[0]) / width_s), return_counts=True)
    return counts


def _dispersion(filled: NDArray[np.int64], bins: int) -> float:
    mean = filled.sum() / bins
    return float((np.square(filled.astype(np.float64)).sum() / bins - mean**2) / mean)
