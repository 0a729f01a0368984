"""Arrival processes of an open loop: when each of n requests is sent. Here those with independent gaps.

Each process is a frozen set of parameters with one method, `times_s(n)`. Every request waits for its gap, the
first one too, as in `vllm bench serve`. The first n times of a longer draw are those of a shorter one; only the
processes of `vllm_arrivals` differ there, by their definition.

Which seed rules: a process with its own `seed` uses that one; without, it draws from the generator that it is
handed (by `Synthetic`, from the root seed); without either, from root seed 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.checks import check_between, check_count, check_positive, check_seed
from servetwin.workloads.spec import MAX_TIME_S, ArgumentError
from servetwin.workloads.streams import arrival_stream, stream

MAX_CV = 100.0
"""Beyond it Gamma gaps underflow to 0 in double precision."""
MIN_CV = 1e-3
MIN_SHAPE, MAX_SHAPE = 0.1, 2000.0
"""Of Weibull gaps: a CV between 430 and 0.0006."""

FloatArray = NDArray[np.float64]


class Arrivals(Protocol):
    """An arrival process."""

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent exponential gaps: coefficient of variation 1."""

    rate_per_s: float
    """Mean number of requests per second, above 0 and finite."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        check_seed(self.seed)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        return arrival_stream(self.seed, rng).exponential(1 / self.rate_per_s, n).cumsum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Independent Gamma gaps of a given coefficient of variation: shape 1/cv^2, scale cv^2/rate.

    Below 1 steadier than Poisson, above 1 burstier. Far above 1 nearly all gaps are practically 0: clumps of
    simultaneous requests (see `Hyperexponential` for bursts whose requests still have gaps).
    """

    rate_per_s: float
    """Mean number of requests per second, above 0 and finite."""
    cv: float
    """Standard deviation of the gaps divided by their mean, 0.001 to 100."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        _check_cv(self.cv, MIN_CV)
        check_seed(self.seed)

    @classmethod
    def from_burstiness(cls, *, rate_per_s: float, burstiness: float, seed: int | None = None) -> Self:
        """The gaps of `vllm bench serve --burstiness b` before it rescales them (`BenchServe` does): cv = 1/sqrt(b)."""
        check_positive("burstiness", burstiness, " (Constant has no variation)")
        return cls(rate_per_s=rate_per_s, cv=1 / math.sqrt(burstiness), seed=seed)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        shape = self.cv**-2
        return arrival_stream(self.seed, rng).gamma(shape, 1 / (self.rate_per_s * shape), n).cumsum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Independent Weibull gaps: of a shape below 1 burstier than Poisson, above 1 steadier."""

    rate_per_s: float
    """Mean number of requests per second, above 0 and finite."""
    shape: float
    """0.1 to 2000; 1 is Poisson."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        check_between("shape", self.shape, MIN_SHAPE, MAX_SHAPE)
        check_seed(self.seed)

    @classmethod
    def from_cv(cls, *, rate_per_s: float, cv: float, seed: int | None = None) -> Self:
        """The shape c with cv^2 = G(1 + 2/c)/G(1 + 1/c)^2 - 1, where G is the gamma function."""
        from scipy.optimize import brentq

        _check_cv(cv, MIN_CV)
        shape = brentq(lambda c: math.log(_weibull_cv(c) / cv), MIN_SHAPE, MAX_SHAPE)
        return cls(rate_per_s=rate_per_s, shape=float(shape), seed=seed)

    @property
    def cv(self) -> float:
        """Standard deviation of the gaps divided by their mean."""
        return _weibull_cv(self.shape)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        scale_s = 1 / (self.rate_per_s * math.gamma(1 + 1 / self.shape))
        return (arrival_stream(self.seed, rng).weibull(self.shape, n) * scale_s).cumsum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperexponential:
    """Gaps from two exponentials with balanced means: many short ones, a few very long ones (cv >= 1).

    Half of the expected time passes in gaps of either kind, which leaves the cv as the only free parameter:
    a gap is short with probability p = (1 + sqrt((cv^2 - 1)/(cv^2 + 1)))/2 and has the mean 1/(2 p rate).
    """

    rate_per_s: float
    """Mean number of requests per second, above 0 and finite."""
    cv: float
    """Standard deviation of the gaps divided by their mean, 1 (Poisson) to 100."""
    seed: int | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)
        _check_cv(self.cv, 1.0)
        check_seed(self.seed)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]."""
        check_count("n", n, at_least=0)
        squared = self.cv**2
        p_long = 1 / ((squared + 1) * (1 + math.sqrt((squared - 1) / (squared + 1))))
        # Both uniforms of a request are drawn together, so that a longer draw begins like a shorter one.
        pick, length = arrival_stream(self.seed, rng).random((n, 2)).T
        mean_s = np.where(pick < p_long, 0.5 / p_long, 0.5 / (1 - p_long)) / self.rate_per_s
        times_s: FloatArray = np.cumsum(-np.log1p(-length) * mean_s)
        return times_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One request every 1/rate seconds."""

    rate_per_s: float
    """Number of requests per second, above 0 and finite."""

    def __post_init__(self) -> None:
        check_rate(self.rate_per_s)

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """Send times of `n` requests in seconds, ascending, shape [n]; nothing is drawn."""
        check_count("n", n, at_least=0)
        return np.arange(1, n + 1) / self.rate_per_s


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Every request at time 0: vLLM's request rate `inf`."""

    def times_s(self, n: int, rng: np.random.Generator | None = None) -> FloatArray:
        """`n` zeros, shape [n]; nothing is drawn."""
        check_count("n", n, at_least=0)
        return np.zeros(n)


def send_times_s(arrivals: Arrivals, n: int, seed: int) -> FloatArray:
    """Times of `n` requests or sessions in seconds, shape [n], from the stream `arrivals` of the root `seed`.

    Raises ArgumentError for times that no RequestSpec may have.
    """
    times_s = arrivals.times_s(n, stream(seed, "arrivals"))
    if n and not times_s[-1] <= MAX_TIME_S:
        raise ArgumentError(
            "arrivals",
            f"would send the last of {n:,} at {times_s[-1]:.6g} s: must be at most {MAX_TIME_S:g} s",
        )
    return times_s


def check_rate(rate_per_s: float) -> None:
    """`rate_per_s` must be a finite number above 0."""
    check_positive("rate_per_s", rate_per_s, " (AllAtOnce sends everything at time 0)")


def _check_cv(cv: float, smallest: float) -> None:
    check_between("cv", cv, smallest, MAX_CV, " (Constant has no variation)")


def _weibull_cv(shape: float) -> float:
    return math.sqrt(math.expm1(math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)))
