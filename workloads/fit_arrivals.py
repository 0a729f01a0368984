"""Fits an arrival process to send times.

How one is chosen: the span is cut into 1, 2, 4 ... 64 equal steps, each with its own mean rate, and the gaps are
measured in expected requests (so that their mean is 1). Each number of steps is tried with independent gaps (Poisson,
Gamma, Weibull, hyperexponential, each at its greatest likelihood), and one step and the best number with MMPP(2),
too. The smallest BIC wins: (number of parameters) log(gaps) - 2 log(likelihood), each step being a parameter.

Where gaps drawn from the winner still differ from the trace's by more than GAPS_DIFFER (the largest difference between
their distributions), the observed gaps take its place, with as many of its steps as leave their form as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.fit_gaps import independent_gaps, observed_gaps, switching_rate
from servetwin.workloads.fitted_arrivals import ArrivalsModel, Process
from servetwin.workloads.kolmogorov_smirnov import kolmogorov_smirnov
from servetwin.workloads.statistics.ticks import find_ticks, spread_ticks
from servetwin.workloads.streams import stream

MOST_STEPS = 64
GAPS_PER_STEP = 30
"""Needed on average for a profile of more steps to be tried."""
MIN_GAPS = 20
"""With fewer the gaps are taken for Poisson: their form cannot be told."""
SHORTEST = 1e-7
"""Of a mean gap: shorter ones are taken for as long; clocks cannot tell them from 0."""
GAPS_DIFFER = 0.05
PARAMETERS = {"poisson": 0, "gamma": 1, "weibull": 1, "hyperexponential": 1, "mmpp2": 3}
"""Of each kind of process, beside the rates."""


def fit_arrivals(times_s: FloatArray) -> ArrivalsModel | None:
    """The arrival process that these send times look most like, shape [n], ascending, in seconds.

    None where there is nothing to fit: all times are the same.
    """
    if len(times_s) < 2 or times_s[0] == times_s[-1]:
        return None
    ticks = find_ticks(times_s)
    tick_s = None if ticks is None else ticks.tick_s
    if tick_s is not None:
        times_s = spread_ticks(times_s, tick_s)
    candidates = _candidates(times_s - times_s[0])
    best = min(candidates, key=lambda c: c.bic)
    considered = _of_each_kind(candidates, best.bic)
    model = _model(best.process, best.clock, tick_s, considered)
    if _like_the_gaps(model, times_s):
        return model
    observed = (
        _model(observed_gaps(clock.gaps()), clock, tick_s, considered)
        for steps in _halves(best.clock.steps)
        for clock in [_Clock(times_s - times_s[0], steps)]
    )
    return next((other for other in observed if _like_the_gaps(other, times_s)), model)


def _model(
    process: Process, clock: _Clock, tick_s: float | None, considered: dict[str, float]
) -> ArrivalsModel:
    return ArrivalsModel(
        process=process,
        rates_per_s=tuple(clock.rates_per_s.tolist()),
        step_s=clock.step_s,
        spread_tick_s=tick_s,
        bic_above_best=considered,
    )


def _halves(steps: int) -> Iterator[int]:
    while steps:
        yield steps
        steps //= 2


def _like_the_gaps(model: ArrivalsModel, times_s: FloatArray) -> bool:
    """Whether drawn gaps differ little from these, beyond what chance alone makes of so many (95 %)."""
    drawn_s = model.build().times_s(len(times_s), stream(0, "drawn gaps"))
    difference, _ = kolmogorov_smirnov(np.diff(times_s), np.diff(drawn_s))
    return difference <= GAPS_DIFFER + 1.36 * math.sqrt(2 / (len(times_s) - 1))


@dataclass(frozen=True, slots=True)
class _Clock:
    """A profile of the rate, and the gaps as it measures them."""

    since_first_s: FloatArray
    steps: int

    @property
    def step_s(self) -> float:
        return float(self.since_first_s[-1]) / self.steps

    @property
    def rates_per_s(self) -> FloatArray:
        """Shape [steps]; the request at time 0, which no gap leads to, is not counted."""
        return np.bincount(self._step_of_each(), minlength=self.steps) / self.step_s

    def gaps(self) -> FloatArray:
        """The gaps in expected requests, shape [n - 1], above 0."""
        edges_s = np.arange(self.steps + 1) * self.step_s
        expected = np.concatenate(([0.0], np.cumsum(self.rates_per_s * self.step_s)))
        gaps = np.diff(np.interp(self.since_first_s, edges_s, expected))
        return np.maximum(gaps, SHORTEST)

    def log_rates(self) -> float:
        """The logarithm of the product of the rates at all requests: what this measure adds to a likelihood."""
        return float(np.log(self.rates_per_s[self._step_of_each()]).sum())

    def _step_of_each(self) -> NDArray[np.int64]:
        """A request at an edge belongs to the step before: the last one is within the last step."""
        place = np.ceil(self.since_first_s[1:] / self.step_s).astype(np.int64) - 1
        return np.clip(place, 0, self.steps - 1)


@dataclass(frozen=True, slots=True)
class _Candidate:
    process: Process
    clock: _Clock
    log_density: float
    """Of the gaps as the clock measures them."""
    log_rates: float

    @property
    def bic(self) -> float:
        parameters = self.clock.steps + PARAMETERS[self.process.kind]
        gaps = len(self.clock.since_first_s) - 1
        return parameters * math.log(gaps) - 2 * (self.log_density + self.log_rates)

    @property
    def name(self) -> str:
        steps = self.clock.steps
        return f"{self.process.kind}, {steps} rate" + "s" * (steps > 1)


def _candidates(since_first_s: FloatArray) -> list[_Candidate]:
    gaps = len(since_first_s) - 1
    most = max(1, min(MOST_STEPS, gaps // GAPS_PER_STEP))
    candidates: list[_Candidate] = []
    for steps in (2**i for i in range(most.bit_length())):
        candidates += _independent(_Clock(since_first_s, steps), poisson_only=gaps < MIN_GAPS)
    if gaps >= MIN_GAPS:
        best = min(candidates, key=lambda c: c.bic)
        for steps in sorted({1, best.clock.steps}):
            clock = _Clock(since_first_s, steps)
            candidates.append(_switching(clock))
    return candidates


def _independent(clock: _Clock, poisson_only: bool) -> Iterator[_Candidate]:
    log_rates = clock.log_rates()
    for process, log_density in independent_gaps(clock.gaps()):
        if process.kind == "poisson" or not poisson_only:
            yield _Candidate(process, clock, log_density, log_rates)


def _switching(clock: _Clock) -> _Candidate:
    process, log_density = switching_rate(clock.gaps())
    return _Candidate(process, clock, log_density, clock.log_rates())


def _of_each_kind(candidates: Sequence[_Candidate], best_bic: float) -> dict[str, float]:
    """Each kind of process with its best profile -> its BIC above the best one's."""
    told: dict[str, float] = {}
    kinds: set[str] = set()
    for candidate in sorted(candidates, key=lambda c: c.bic):
        if candidate.process.kind not in kinds:
            kinds.add(candidate.process.kind)
            told[candidate.name] = round(candidate.bic - best_bic, 1)
    return told
