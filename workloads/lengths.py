"""Length models: how many tokens a prompt or an answer has.

Each class is a frozen set of parameters with one method, `sample(n, rng)`; lengths are at least 1 token. Those here
have a formula; lengths as observed are in `observed_lengths`, input and output together in `joint_lengths`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.checks import check_between, check_count, check_positive
from servetwin.workloads.spec import MAX_TOKENS, WorkloadError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_DISTINCT = 10_000_000
"""Lengths that a Zipf distribution may spread over: it is a table."""
MIN_SHARE = 1e-6
"""Share of a normal distribution that must lie within the limits it is cut to."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent lengths in tokens, shape [n], each 1 or more."""
        ...


class QuantileLengths(ABC):
    """Lengths given by their quantile function: one uniform draw makes one length."""

    __slots__ = ()

    @abstractmethod
    def tokens_at(self, p: FloatArray) -> IntArray:
        """The length in tokens that a share p (0 up to 1) of the requests does not exceed, shape as `p`."""

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent lengths in tokens, shape [n]. The first of a longer draw are those of a shorter one."""
        return self.tokens_at(rng.random(n))


@dataclass(frozen=True, slots=True)
class Fixed(QuantileLengths):
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens)

    def tokens_at(self, p: FloatArray) -> IntArray:
        """The same length throughout, shape as `p`."""
        return np.full(p.shape, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(QuantileLengths):
    """Every whole number of tokens from min_tokens to max_tokens, both included, equally likely."""

    min_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        _check_limits(self.min_tokens, self.max_tokens)

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        lengths = self.min_tokens + np.floor(p * (self.max_tokens - self.min_tokens + 1)).astype(np.int64)
        return np.minimum(lengths, self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential(QuantileLengths):
    """Exponential lengths, rounded, then clipped to [min_tokens, max_tokens] (which lowers the mean)."""

    mean_tokens: float
    """Before rounding and clipping."""
    max_tokens: int
    min_tokens: int = 1

    def __post_init__(self) -> None:
        check_positive("mean_tokens", self.mean_tokens)
        _check_limits(self.min_tokens, self.max_tokens)

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        return _clipped(-self.mean_tokens * np.log1p(-p), self.min_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal(QuantileLengths):
    """exp(Normal(mu, sigma)) tokens, rounded, then clipped to [min_tokens, max_tokens].

    Clipping moves what lies outside onto the limits; it is part of the definition and lowers the mean.
    """

    mu: float
    """Natural logarithm of the median in tokens."""
    sigma: float
    """Standard deviation of the logarithm, 0 or more."""
    max_tokens: int
    min_tokens: int = 1

    def __post_init__(self) -> None:
        _check_lognormal(self.mu, self.sigma)
        _check_limits(self.min_tokens, self.max_tokens)

    @classmethod
    def from_quantiles(cls, *, p50: float, p90: float, max_tokens: int, min_tokens: int = 1) -> Self:
        """The lognormal with this median and 90th percentile in tokens (before clipping)."""
        check_positive("p50", p50)
        check_positive("p90", p90)
        if p90 < p50:
            raise WorkloadError(f"p90 {p90!r}: must be p50 ({p50!r}) or more")
        sigma = math.log(p90 / p50) / NormalDist().inv_cdf(0.9)
        return cls(mu=math.log(p50), sigma=sigma, max_tokens=max_tokens, min_tokens=min_tokens)

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        from scipy.special import ndtri

        # A share of 0 is no number of standard deviations. Clipped before exp as well, which could overflow.
        logs = self.mu + self.sigma * ndtri(np.maximum(p, np.finfo(np.float64).tiny))
        tokens = np.exp(np.minimum(logs, math.log(self.max_tokens) + 1))
        return _clipped(tokens, self.min_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedNormal(QuantileLengths):
    """Normal lengths given that they lie in [min_tokens, max_tokens], rounded: nothing piles up on the limits."""

    mean_tokens: float
    """Of the normal distribution before it is cut."""
    std_tokens: float
    """Standard deviation before it is cut, above 0."""
    max_tokens: int
    min_tokens: int = 1

    def __post_init__(self) -> None:
        check_between("mean_tokens", self.mean_tokens, -MAX_TOKENS, MAX_TOKENS)
        check_positive("std_tokens", self.std_tokens)
        _check_limits(self.min_tokens, self.max_tokens)
        low, high = self._shares()
        if self.min_tokens < self.max_tokens and high - low < MIN_SHARE:
            raise WorkloadError(
                f"mean_tokens {self.mean_tokens!r}: must leave a share of at least {MIN_SHARE:g} between "
                f"min_tokens ({self.min_tokens}) and max_tokens ({self.max_tokens}), here {high - low:.2g}"
            )

    def _shares(self) -> tuple[float, float]:
        """What lies below the lower and below the upper limit."""
        normal = NormalDist(self.mean_tokens, self.std_tokens)
        return normal.cdf(self.min_tokens), normal.cdf(self.max_tokens)

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        from scipy.special import ndtri

        low, high = self._shares()
        deviations = ndtri(np.clip(low + p * (high - low), np.finfo(np.float64).tiny, 1 - 2**-53))
        return _clipped(self.mean_tokens + self.std_tokens * deviations, self.min_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoLognormal(QuantileLengths):
    """A lognormal body and a Pareto tail, mixed; rounded, then clipped to [min_tokens, max_tokens].

    ServeGen finds inputs of production services so (and outputs exponential).
    """

    mu: float
    """Of the body: natural logarithm of its median in tokens."""
    sigma: float
    """Of the body: standard deviation of the logarithm, above 0."""
    tail_share: float
    """Share of requests in the tail, 0 to 1."""
    tail_from_tokens: float
    """Smallest length in the tail, before clipping."""
    tail_index: float
    """Of the tail: a share (tail_from_tokens/x)^tail_index of it is longer than x."""
    max_tokens: int
    min_tokens: int = 1

    def __post_init__(self) -> None:
        _check_lognormal(self.mu, self.sigma)
        check_positive("sigma", self.sigma)
        check_between("tail_share", self.tail_share, 0, 1)
        check_positive("tail_from_tokens", self.tail_from_tokens)
        check_positive("tail_index", self.tail_index)
        _check_limits(self.min_tokens, self.max_tokens)

    def share_up_to(self, tokens: FloatArray) -> FloatArray:
        """The share of lengths (before rounding) that are not longer, shape as `tokens` (above 0)."""
        from scipy.special import ndtr

        body = ndtr((np.log(tokens) - self.mu) / self.sigma)
        tail = 1 - (self.tail_from_tokens / np.maximum(tokens, self.tail_from_tokens)) ** self.tail_index
        shares: FloatArray = (1 - self.tail_share) * body + self.tail_share * tail
        return shares

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""

        def reached(tokens: IntArray) -> NDArray[np.bool_]:
            return self.share_up_to(tokens.astype(np.float64) + 0.5) >= p

        return _smallest(reached, p, self.min_tokens, self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf(QuantileLengths):
    """Length min_tokens + k - 1 with a probability that falls as 1/k^theta, up to max_tokens.

    Vidur's defaults: theta 0.6, 1024 to 4096. Exact, where Vidur approximates and has fractions of tokens.
    """

    theta: float = 0.6
    """0 (uniform) or more."""
    min_tokens: int = 1024
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        check_between("theta", self.theta, 0, 100)
        _check_limits(self.min_tokens, self.max_tokens)
        if self.max_tokens - self.min_tokens >= MAX_DISTINCT:
            raise WorkloadError(
                f"max_tokens {self.max_tokens}: must be less than min_tokens + {MAX_DISTINCT:,}"
            )

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        ranks = np.arange(1, self.max_tokens - self.min_tokens + 2, dtype=np.float64)
        shares = np.cumsum(ranks**-self.theta)
        return self.min_tokens + np.searchsorted(shares[:-1] / shares[-1], p, side="right").astype(np.int64)


def _clipped(tokens: FloatArray, min_tokens: int, max_tokens: int) -> IntArray:
    return np.clip(np.rint(tokens), min_tokens, max_tokens).astype(np.int64)


def _smallest(
    reached: Callable[[IntArray], NDArray[np.bool_]], like: FloatArray, low: int, high: int
) -> IntArray:
    """Elementwise the smallest whole number of [low, high] for which `reached`, which never goes back, is true.

    `high` where it never is; by bisection.
    """
    lows, highs = np.full(like.shape, low), np.full(like.shape, high)
    while (lows < highs).any():
        middle = (lows + highs) // 2
        is_reached = reached(middle)
        highs = np.where(is_reached, middle, highs)
        lows = np.where(is_reached, lows, np.minimum(middle + 1, highs))
    return lows


def _check_limits(min_tokens: int, max_tokens: int) -> None:
    check_count("min_tokens", min_tokens)
    check_count("max_tokens", max_tokens, at_least=min_tokens)
    check_between("max_tokens", max_tokens, 1, MAX_TOKENS)


def _check_lognormal(mu: float, sigma: float) -> None:
    if not math.isfinite(mu):
        raise WorkloadError(f"mu {mu!r}: must be a finite number")
    if not 0 <= sigma < math.inf:
        raise WorkloadError(f"sigma {sigma!r}: must be a finite number, 0 or more")
