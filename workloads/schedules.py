"""Arrivals at a rate that follows a schedule: steps, spikes, the course of a day. Poisson at every moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.arrivals import FloatArray, check_rate
from servetwin.workloads.checks import check_between, check_count, check_positive, check_seed
from servetwin.workloads.spec import MAX_TIME_S, WorkloadError
from servetwin.workloads.streams import arrival_stream

CANDIDATES = 4096
"""Drawn at once in thinning."""
HOURS = 24


def times_at_rates(points: FloatArray, durations_s: FloatArray, rates_per_s: FloatArray) -> FloatArray:
    """A process of rate 1 made one of these rates: each point through the inverse of the cumulative rate.

    points: ascending, above 0, shape [n]. Step i has the rate rates_per_s[i] for durations_s[i] seconds; no point lies
    beyond the last step. Times in seconds, ascending, shape [n].
    """
    starts_s = np.concatenate(([0.0], durations_s[:-1].cumsum()))
    reached = np.concatenate(([0.0], (durations_s * rates_per_s)[:-1].cumsum()))
    # The last step that a point lies beyond the beginning of: never one of rate 0.
    step = np.searchsorted(reached, points, side="left") - 1
    times_s: FloatArray = np.maximum.accumulate(starts_s[step] + (points - reached[step]) / rates_per_s[step])
    return times_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSteps:
    """A rate that changes at given times and then stays as it is."""

    starts_s: tuple[float, ...]
    """When each rate begins, ascending from 0, in seconds."""
    rates_per_s: tuple[float, ...]
    """0 or more (0: silence); the last one, which holds for ever, above 0."""
    seed: int | None = None

    def __post_init__(self) -> None:
        starts, rates = self.starts_s, self.rates_per_s
        if not starts or starts[0] != 0 or not all(a < b <= MAX_TIME_S for a, b in pairwise(starts)):
            raise WorkloadError(
                f"starts_s {starts!r}: must begin with 0 and ascend to {MAX_TIME_S:g} at most"
            )
        if len(rates) != len(starts):
            raise WorkloadError(f"rates_per_s {rates!r}: must be as many as starts_s ({len(starts)})")
        for i, rate in enumerate(rates[:-1]):
            if rate != 0:
                check_positive(f"rates_per_s[{i}]", rate)
        check_positive(f"rates_per_s[{len(rates) - 1}]", rates[-1], ": it holds for ever")
        check_seed(self.seed)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        points = arrival_stream(self.seed, rng).exponential(size=n).cumsum()
        durations_s = np.diff(self.starts_s, append=np.inf)
        return times_at_rates(points, durations_s, np.asarray(self.rates_per_s, dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A stretch of time with a rate of its own."""

    start_s: float
    """Seconds since the start of the workload, 0 or more."""
    duration_s: float
    rate_per_s: float
    """The rate while it lasts, in place of the base rate, 0 or more (0: an outage of the clients)."""

    def __post_init__(self) -> None:
        check_between("start_s", self.start_s, 0, MAX_TIME_S)
        check_positive("duration_s", self.duration_s)
        if self.rate_per_s != 0:
            check_positive("rate_per_s", self.rate_per_s)

    @property
    def end_s(self) -> float:
        """Seconds since the start of the workload."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Spikes:
    """A base rate with spikes that do not overlap. (A spike on top of other load: `Superposition`.)"""

    base_rate_per_s: float
    """Between the spikes and after the last, above 0 and finite."""
    spikes: tuple[Spike, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive("base_rate_per_s", self.base_rate_per_s)
        check_seed(self.seed)
        if not self.spikes:
            raise WorkloadError("spikes (): must hold at least one (Poisson has none)")
        for a, b in pairwise(self._sorted()):
            if b.start_s < a.end_s:
                raise WorkloadError(f"spikes {a!r} and {b!r}: must not overlap")

    def _sorted(self) -> list[Spike]:
        return sorted(self.spikes, key=lambda spike: spike.start_s)

    def steps(self) -> RateSteps:
        """The same schedule, step by step."""
        rates = dict(self._changes())
        return RateSteps(starts_s=tuple(rates), rates_per_s=tuple(rates.values()), seed=self.seed)

    def _changes(self) -> Iterator[tuple[float, float]]:
        """(from, rate); of two at one time the later one holds."""
        yield 0.0, self.base_rate_per_s
        for spike in self._sorted():
            yield spike.start_s, spike.rate_per_s
            yield spike.end_s, self.base_rate_per_s

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        return self.steps().times_s(n, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """The course of a day: rate(t) = mean (1 + amplitude sin(2 pi (t - t0)/period)), sampled by thinning.

    Candidates come at the peak rate; each is kept with probability rate(t)/peak. The workload starts at hour 0.
    """

    rate_per_s: float
    """Mean over a whole day, above 0 and finite."""
    amplitude: float
    """0 (no course) to 1 (silent in the trough); the peak is (1 + amplitude) times the mean."""
    peak_hour: float = 15.0
    """When the rate is highest, in 24ths of `period_s`, 0 up to 24."""
    period_s: float = 86_400.0
    """How long a day takes, in seconds."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        check_between("amplitude", self.amplitude, 0, 1)
        check_between("peak_hour", self.peak_hour, 0, HOURS)
        check_positive("period_s", self.period_s)
        check_seed(self.seed)

    @classmethod
    def from_peak_to_trough(
        cls,
        *,
        rate_per_s: float,
        peak_to_trough: float,
        peak_hour: float = 15.0,
        period_s: float = 86_400.0,
        seed: int | None = None,
    ) -> Self:
        """The course whose highest rate is `peak_to_trough` (1 or more) times its lowest: (1 + a)/(1 - a)."""
        check_between("peak_to_trough", peak_to_trough, 1, 1e9)
        return cls(
            rate_per_s=rate_per_s,
            amplitude=(peak_to_trough - 1) / (peak_to_trough + 1),
            peak_hour=peak_hour,
            period_s=period_s,
            seed=seed,
        )

    def rates_at(self, times_s: FloatArray) -> FloatArray:
        """Requests per second at each time, shape as given."""
        phase = 2 * math.pi * (times_s / self.period_s - self.peak_hour / HOURS)
        rates: FloatArray = self.rate_per_s * (1 + self.amplitude * np.cos(phase))
        return rates

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        rng = arrival_stream(self.seed, rng)
        kept = [np.empty(0)]
        now_s, missing = 0.0, n
        while missing > 0:
            candidates_s, passed = self._candidates(now_s, rng)
            kept.append(candidates_s[passed])
            now_s, missing = candidates_s[-1], missing - int(passed.sum())
        return np.concatenate(kept)[:n]

    def _candidates(self, now_s: float, rng: np.random.Generator) -> tuple[FloatArray, NDArray[np.bool_]]:
        """The next candidates after `now_s`, and which of them become requests."""
        peak_per_s = self.rate_per_s * (1 + self.amplitude)
        gap, keep = rng.random((CANDIDATES, 2)).T
        times_s = now_s + np.cumsum(-np.log1p(-gap)) / peak_per_s
        return times_s, keep * peak_per_s < self.rates_at(times_s)
