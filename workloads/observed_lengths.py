"""Lengths as they were observed: the values themselves, or quantiles of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servetwin.workloads.lengths import FloatArray, IntArray, QuantileLengths
from servetwin.workloads.spec import WorkloadError

SHOWN = 16
"""Values that a repr lists; of more it tells number, mean and limits."""
PERCENTILES = tuple(i / 100 for i in range(100)) + (0.995, 0.999, 1.0)


@dataclass(frozen=True, slots=True, repr=False)
class Empirical(QuantileLengths):
    """Lengths drawn from observed values, each value equally likely (with replacement)."""

    values: tuple[int, ...]
    """Ascending."""

    def __init__(self, values: Iterable[int]) -> None:
        observed = observed_tokens("values", [*values])
        object.__setattr__(self, "values", tuple(np.sort(observed).tolist()))

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        place = np.minimum((p * len(self.values)).astype(np.int64), len(self.values) - 1)
        return np.asarray(self.values, dtype=np.int64)[place]

    def __repr__(self) -> str:
        if len(self.values) <= SHOWN:
            return f"Empirical({list(self.values)})"
        return f"Empirical({described(self.values)})"


@dataclass(frozen=True, slots=True)
class QuantileGrid(QuantileLengths):
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

    @classmethod
    def from_values(cls, values: ArrayLike, probabilities: Iterable[float] = PERCENTILES) -> Self:
        """The quantiles of observed lengths in tokens, at the percentiles and some more of the tail by default."""
        at = [*probabilities]
        tokens = np.quantile(observed_tokens("values", values), at)
        return cls(dict(zip(at, tokens.tolist(), strict=True)))

    def quantile(self, p: float) -> float:
        """The length in tokens that a share `p` of the requests does not exceed (before rounding)."""
        return float(np.interp(p, self.probabilities, self.tokens))

    @property
    def mean_tokens(self) -> float:
        """The expected length in tokens (before rounding)."""
        return float(np.trapezoid(self.tokens, self.probabilities))

    def tokens_at(self, p: FloatArray) -> IntArray:
        """Length in tokens by share of requests, shape as `p`."""
        return np.rint(np.interp(p, self.probabilities, self.tokens)).astype(np.int64)


def observed_tokens(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """The same as an array. Raises WorkloadError unless all are whole numbers of 1 or more, at least one."""
    observed = np.asarray(values)
    if observed.ndim != 1 or observed.size == 0 or observed.dtype.kind not in "iu" or observed.min() < 1:
        raise WorkloadError(
            f"{name}: must be whole numbers of tokens, 1 or more, at least one; got {observed!r}"
        )
    return observed.astype(np.int64)


def described(values: ArrayLike) -> str:
    """Many lengths in a few words."""
    observed = np.asarray(values)
    return f"{observed.size} values, mean {observed.mean():.6g}, {observed.min()} to {observed.max()}"
