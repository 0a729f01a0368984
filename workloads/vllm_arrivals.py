"""The arrivals of `vllm bench serve`: burstiness with times rescaled to the exact rate, and ramp-up by request index.

Both look at the number of requests: a longer draw does not begin with a shorter one (unless gaps are constant).
Source: vllm/benchmarks/serve.py, `get_request`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.checks import check_above_0, check_count, check_positive, check_seed
from servetwin.workloads.spec import ArgumentError
from servetwin.workloads.streams import arrival_stream

Strategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServe:
    """`--request-rate R --burstiness b`: Gamma gaps of shape b, then all times stretched so that the last is n/R.

    The rate is therefore exact and the process only nearly Gamma. Gaps have a CV of nearly 1/sqrt(b).
    """

    rate_per_s: float
    """Requests per second, above 0; infinite: all at time 0."""
    burstiness: float = 1.0
    """Above 0: below 1 bursty, 1 Poisson, above 1 steadier, infinite: constant gaps."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_above_0("rate_per_s", self.rate_per_s)
        check_above_0("burstiness", self.burstiness)
        check_seed(self.seed)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        if math.isinf(self.rate_per_s) or n == 0:
            return np.zeros(n)
        times_s = _unit_gaps(n, self.burstiness, arrival_stream(self.seed, rng)).cumsum()
        # As in vLLM: where every gap underflowed there is nothing to stretch.
        return times_s if times_s[-1] == 0 else times_s * (n / self.rate_per_s / times_s[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RampUp:
    """`--ramp-up-strategy`: the rate goes from start to end with the index of the request, not with time.

    Request i of n waits for a Gamma gap of shape `burstiness` and mean 1/rate(i/(n-1)); nothing is rescaled.
    """

    strategy: Strategy
    """linear: rate = start + (end - start) p. exponential: rate = start (end/start)^p."""
    start_rate_per_s: float
    """Rate of the first request, above 0."""
    end_rate_per_s: float
    """Rate of the last request, not below the first one's, as in vLLM."""
    burstiness: float = 1.0
    """Above 0; infinite: every gap is 1/rate."""
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in ("linear", "exponential"):
            raise ArgumentError("strategy", f"{self.strategy!r}: must be linear or exponential")
        check_positive("start_rate_per_s", self.start_rate_per_s)
        check_positive("end_rate_per_s", self.end_rate_per_s)
        if self.end_rate_per_s < self.start_rate_per_s:
            raise ArgumentError(
                "end_rate_per_s",
                f"{self.end_rate_per_s!r}: must be the rate at the start, {self.start_rate_per_s!r}, or more",
            )
        check_above_0("burstiness", self.burstiness)
        check_seed(self.seed)

    def rates_per_s(self, n: int) -> FloatArray:
        """The rate at which each of `n` requests is sent, shape [n]."""
        progress = np.arange(n) / max(n - 1, 1)
        start, end = self.start_rate_per_s, self.end_rate_per_s
        if self.strategy == "linear":
            return start + (end - start) * progress
        rates: FloatArray = start * (end / start) ** progress
        return rates

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        gaps = _unit_gaps(n, self.burstiness, arrival_stream(self.seed, rng))
        return (gaps / self.rates_per_s(n)).cumsum()


def _unit_gaps(n: int, burstiness: float, rng: np.random.Generator) -> FloatArray:
    """Gaps of mean 1, shape [n]."""
    if math.isinf(burstiness):
        return np.ones(n)
    return rng.gamma(burstiness, 1 / burstiness, n)
