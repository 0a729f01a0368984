"""Length models: how many tokens a prompt or an answer has.

Each class is a frozen set of parameters with one method, `sample(n, rng)`; lengths are at least 1 token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.checks import check_count, check_positive
from servetwin.workloads.spec import WorkloadError

IntArray = NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent lengths in tokens, shape [n], each 1 or more."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens)

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` times the same length in tokens, shape [n]; nothing is drawn."""
        return np.full(n, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
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
        if not math.isfinite(self.mu):
            raise WorkloadError(f"mu {self.mu!r}: must be a finite number")
        if not 0 <= self.sigma < math.inf:
            raise WorkloadError(f"sigma {self.sigma!r}: must be a finite number, 0 or more")
        check_count("min_tokens", self.min_tokens)
        check_count("max_tokens", self.max_tokens, at_least=self.min_tokens)

    @classmethod
    def from_quantiles(cls, *, p50: float, p90: float, max_tokens: int, min_tokens: int = 1) -> Self:
        """The lognormal with this median and 90th percentile in tokens (before clipping)."""
        check_positive("p50", p50)
        check_positive("p90", p90)
        if p90 < p50:
            raise WorkloadError(f"p90 {p90!r}: must be p50 ({p50!r}) or more")
        sigma = math.log(p90 / p50) / NormalDist().inv_cdf(0.9)
        return cls(mu=math.log(p50), sigma=sigma, max_tokens=max_tokens, min_tokens=min_tokens)

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent lengths in tokens, shape [n]."""
        logs = rng.normal(self.mu, self.sigma, n)
        # Clipped before exp as well, which could overflow.
        tokens = np.exp(np.minimum(logs, math.log(self.max_tokens) + 1))
        return np.clip(np.rint(tokens), self.min_tokens, self.max_tokens).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths drawn from observed values, each value equally likely (with replacement)."""

    values: tuple[int, ...]

    def __init__(self, values: Iterable[int]) -> None:
        observed = np.asarray(list(values))
        if observed.size == 0 or observed.dtype.kind not in "iu" or observed.min() < 1:
            raise WorkloadError(
                f"values: must be whole numbers of tokens, 1 or more, at least one; got {observed!r}"
            )
        object.__setattr__(self, "values", tuple(observed.tolist()))

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent lengths in tokens, shape [n]."""
        return rng.choice(np.asarray(self.values, dtype=np.int64), n)


@dataclass(frozen=True, slots=True)
class QuantileGrid:
    """Lengths whose quantile function runs linearly between known quantiles; rounded to whole tokens."""

    probabilities: tuple[float, ...]
    """Ascending, from 0 to 1."""
    tokens: tuple[float, ...]
    """Length in tokens at each probability, never falling, 1 or more."""

    def __init__(self, quantiles: Mapping[float, float]) -> None:
        """`quantiles`: probability -> length in tokens; 0 (smallest) and 1 (largest) must be among them."""
        grid = sorted(quantiles.items())
        object.__setattr__(self, "probabilities", tuple(p for p, _ in grid))
        object.__setattr__(self, "tokens", tuple(t for _, t in grid))
        if not grid or self.probabilities[0] != 0 or self.probabilities[-1] != 1:
            raise WorkloadError(f"quantiles {list(self.probabilities)}: must run from probability 0 to 1")
        lengths = np.asarray(self.tokens, dtype=np.float64)
        if not np.isfinite(lengths).all() or lengths[0] < 1 or (np.diff(lengths) < 0).any():
            raise WorkloadError(f"quantiles {list(self.tokens)}: must be 1 token or more and never fall")

    def quantile(self, p: float) -> float:
        """The length in tokens that a share `p` of the requests does not exceed (before rounding)."""
        return float(np.interp(p, self.probabilities, self.tokens))

    @property
    def mean_tokens(self) -> float:
        """The expected length in tokens (before rounding)."""
        return float(np.trapezoid(self.tokens, self.probabilities))

    def sample(self, n: int, rng: np.random.Generator) -> IntArray:
        """`n` independent lengths in tokens, shape [n]."""
        return np.rint(np.interp(rng.random(n), self.probabilities, self.tokens)).astype(np.int64)
