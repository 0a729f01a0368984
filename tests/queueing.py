"""Queueing theory to hold the simulator against: closed forms, and intervals around what a run measured.

The unit of time is the mean service time, so the arrival rate of a single server is its utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
CONFIDENCE = 0.999
BATCHES = 40
WARM_UP = 0.05
"""Share of the requests, first in order, that is left out: the queue starts empty."""


def pollaczek_khinchine(rate: float, mean_square_service: float) -> float:
    """Mean time in an M/G/1 system: service of mean 1 and the given second moment, Poisson arrivals."""
    return 1 + rate * mean_square_service / (2 * (1 - rate))


def erlang_c(rate: float, servers: int) -> float:
    """Mean time in an M/M/c system: exponential services of mean 1, Poisson arrivals, one queue."""
    all_busy = rate**servers / factorial(servers) / (1 - rate / servers)
    must_wait = all_busy / (all_busy + sum(rate**k / factorial(k) for k in range(servers)))
    return 1 + must_wait / (servers - rate)


def geometric_servers(rate: float, servers: int, step: float, states: int = 200) -> float:
    """Mean time in a system whose servers move in common steps: exact for every length of the step.

    A service ends with each step with probability `step` (mean 1), arrivals are Poisson. Whoever arrives during a step
    waits for its end; an empty system starts a step with the next arrival. So the number present at the start of a
    step is a Markov chain, cut off here at `states`. Little's law makes a time of the mean number.
    """
    arrivals = stats.poisson.pmf(np.arange(states), rate * step)
    moves = np.zeros((states, states))
    for present in range(1, states):
        busy = min(present, servers)
        for ended, probability in enumerate(stats.binom.pmf(np.arange(busy + 1), busy, step)):
            left = present - ended
            moves[present, left:] += probability * arrivals[: states - left]
    to_empty = moves[1:, 0]
    chain = moves[1:, 1:].copy()
    chain[:, 0] += to_empty
    chain[:, -1] += 1 - chain.sum(axis=1)
    balance = chain.T - np.eye(states - 1)
    balance[-1] = 1
    shares = np.linalg.solve(balance, np.eye(states - 1)[-1])
    present_time = step * (shares @ np.arange(1, states)) + rate * step**2 / 2
    return float(present_time / (step + shares @ to_empty / rate) / rate)


def waits(gaps: NDArray[np.int64], services: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lindley's recursion: waits at one server, first come first served; gaps[i] lies before request i."""
    drift = np.concatenate([[0], np.cumsum(services[:-1] - gaps[1:])])
    wait: NDArray[np.int64] = drift - np.minimum.accumulate(drift)
    return wait


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its confidence interval."""

    mean: float
    half_width: float

    def __contains__(self, value: float) -> bool:
        return abs(value - self.mean) <= self.half_width


def interval(samples: Floats, controls: list[tuple[Floats, float]]) -> Interval:
    """The mean of correlated samples [n] at CONFIDENCE, from batch means with control variates.

    `controls`: what was drawn for each sample, with its true mean; a regression over the batches takes out what the
    luck of the draw explains (Lavenberg and Welch, 1981).
    """
    start = round(len(samples) * WARM_UP)
    size = (len(samples) - start) // BATCHES

    def batch_means(values: Floats) -> Floats:
        means: Floats = values[start : start + size * BATCHES].reshape(BATCHES, size).mean(axis=1)
        return means

    luck = np.column_stack([np.ones(BATCHES), *(batch_means(drawn - mean) for drawn, mean in controls)])
    measured = batch_means(samples)
    fit = np.linalg.lstsq(luck, measured, rcond=None)[0]
    freedom = BATCHES - luck.shape[1]
    variance = np.sum((measured - luck @ fit) ** 2) / freedom * np.linalg.inv(luck.T @ luck)[0, 0]
    return Interval(float(fit[0]), float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance)))
