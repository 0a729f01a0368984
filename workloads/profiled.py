"""An arrival process whose rate follows a profile that repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from servetwin.workloads.arrivals import Arrivals, FloatArray
from servetwin.workloads.checks import check_count, check_positive
from servetwin.workloads.schedules import times_at_rates
from servetwin.workloads.spec import WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A process of rate 1 whose clock runs as fast as the rate is: its gaps shrink where many requests are expected.

    After the last step the profile begins anew. With a Poisson process it is Poisson at every moment.
    """

    process: Arrivals
    """At one request per unit of its own time."""
    rates_per_s: tuple[float, ...]
    """The rate in each step, 0 or more, the last one above 0."""
    step_s: float
    """How long each step lasts, in seconds."""

    def __post_init__(self) -> None:
        check_positive("step_s", self.step_s)
        if not self.rates_per_s:
            raise WorkloadError("rates_per_s (): must hold at least one rate")
        for i, rate in enumerate(self.rates_per_s):
            if rate != 0 or i == len(self.rates_per_s) - 1:
                check_positive(f"rates_per_s[{i}]", rate)

    @property
    def rate_per_s(self) -> float:
        """Mean number of requests per second over the whole profile."""
        return math.fsum(self.rates_per_s) / len(self.rates_per_s)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        points = self.process.times_s(n, rng)
        if n == 0:
            return points
        # The margin is for sums rounded in another order.
        expected = math.fsum(self.rates_per_s) * self.step_s
        rounds = int(points[-1] * (1 + 1e-9) / expected) + 1
        rates = np.tile(np.asarray(self.rates_per_s, dtype=np.float64), rounds)
        return times_at_rates(
            np.maximum(points, np.finfo(np.float64).tiny), np.full(len(rates), self.step_s), rates
        )
