"""Input and output lengths of a request together: independent, correlated by rank, observed pairs, a split total."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike

from servetwin.workloads.checks import check_between, check_positive
from servetwin.workloads.lengths import IntArray, Lengths, QuantileLengths
from servetwin.workloads.observed_lengths import QuantileGrid, described, observed_tokens
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.streams import stream


class JointLengths(Protocol):
    """A distribution of pairs of lengths."""

    def sample_pairs(self, n: int, seed: int) -> tuple[IntArray, IntArray]:
        """Input and output tokens of `n` requests, shape [n] each, 1 or more; from streams under the root `seed`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Independent:
    """Neither length says anything about the other."""

    input_lengths: Lengths
    output_lengths: Lengths

    def sample_pairs(self, n: int, seed: int) -> tuple[IntArray, IntArray]:
        """Input and output tokens of `n` requests, shape [n] each; changing one model leaves the other's draws."""
        inputs = self.input_lengths.sample(n, stream(seed, "input_lengths"))
        return inputs, self.output_lengths.sample(n, stream(seed, "output_lengths"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCorrelated:
    """Two distributions and Spearman's rank correlation between them, by a Gaussian copula.

    The underlying normal correlation is 2 sin(pi r/6). With r = 0 the draws are those of `Independent`, and the inputs
    are the same for every r. (Many equal lengths weaken the rank correlation that is seen.)
    """

    input_lengths: QuantileLengths
    output_lengths: QuantileLengths
    rank_correlation: float
    """-1 to 1."""

    def __post_init__(self) -> None:
        for name in ("input_lengths", "output_lengths"):
            if not isinstance(getattr(self, name), QuantileLengths):
                raise WorkloadError(
                    f"{name} {getattr(self, name)!r}: must be lengths with a quantile function"
                )
        check_between("rank_correlation", self.rank_correlation, -1, 1)

    @classmethod
    def from_pairs(cls, input_tokens: ArrayLike, output_tokens: ArrayLike) -> Self:
        """Quantiles and rank correlation of observed pairs, shape [n] each."""
        from scipy.stats import rankdata

        inputs, outputs = _pairs(input_tokens, output_tokens)
        ranks = np.stack([rankdata(inputs), rankdata(outputs)])
        varied = bool((ranks.std(axis=1) > 0).all())
        return cls(
            input_lengths=QuantileGrid.from_values(inputs),
            output_lengths=QuantileGrid.from_values(outputs),
            rank_correlation=float(np.clip(np.corrcoef(ranks)[0, 1], -1, 1)) if varied else 0.0,
        )

    def sample_pairs(self, n: int, seed: int) -> tuple[IntArray, IntArray]:
        """Input and output tokens of `n` requests, shape [n] each."""
        p = stream(seed, "input_lengths").random(n)
        q = stream(seed, "output_lengths").random(n)
        if self.rank_correlation != 0:
            from scipy.special import ndtr, ndtri

            r = 2 * math.sin(math.pi * self.rank_correlation / 6)
            tiny = np.finfo(np.float64).tiny
            normal = r * ndtri(np.maximum(p, tiny)) + math.sqrt(1 - r * r) * ndtri(np.maximum(q, tiny))
            q = ndtr(normal)
        return self.input_lengths.tokens_at(p), self.output_lengths.tokens_at(q)


@dataclass(frozen=True, slots=True, repr=False)
class EmpiricalPairs:
    """Pairs drawn from observed ones, each equally likely (with replacement): whatever joins them is kept."""

    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    def __init__(self, input_tokens: ArrayLike, output_tokens: ArrayLike) -> None:
        """Lengths of observed requests in tokens, shape [n] each."""
        inputs, outputs = _pairs(input_tokens, output_tokens)
        object.__setattr__(self, "input_tokens", tuple(inputs.tolist()))
        object.__setattr__(self, "output_tokens", tuple(outputs.tolist()))

    def sample_pairs(self, n: int, seed: int) -> tuple[IntArray, IntArray]:
        """Input and output tokens of `n` requests, shape [n] each."""
        place = (stream(seed, "lengths").random(n) * len(self.input_tokens)).astype(np.int64)
        return (
            np.asarray(self.input_tokens, dtype=np.int64)[place],
            np.asarray(self.output_tokens, dtype=np.int64)[place],
        )

    def __repr__(self) -> str:
        return (
            f"EmpiricalPairs(input: {described(self.input_tokens)}; output: {described(self.output_tokens)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTotal:
    """A total length, split at a fixed ratio: Vidur's `prefill_to_decode_ratio`, in whole tokens.

    The output is total/(1 + ratio), rounded, at least 1 and at most total - 1; the input is the rest.
    """

    total_lengths: Lengths
    """Of input and output together, 2 or more."""
    prefill_to_decode_ratio: float = 20.0

    def __post_init__(self) -> None:
        check_positive("prefill_to_decode_ratio", self.prefill_to_decode_ratio)

    def sample_pairs(self, n: int, seed: int) -> tuple[IntArray, IntArray]:
        """Input and output tokens of `n` requests, shape [n] each. A total of 1 token raises WorkloadError."""
        total = self.total_lengths.sample(n, stream(seed, "lengths"))
        if n and total.min() < 2:
            raise WorkloadError(f"total_lengths {self.total_lengths!r}: must be 2 tokens or more, drew 1")
        outputs = np.rint(total / (1 + self.prefill_to_decode_ratio)).astype(np.int64)
        outputs = np.clip(outputs, 1, total - 1)
        return total - outputs, outputs


def _pairs(input_tokens: ArrayLike, output_tokens: ArrayLike) -> tuple[IntArray, IntArray]:
    inputs = observed_tokens("input_tokens", input_tokens)
    outputs = observed_tokens("output_tokens", output_tokens)
    if len(inputs) != len(outputs):
        raise WorkloadError(
            f"output_tokens: must be as many as input_tokens ({len(inputs)}), not {len(outputs)}"
        )
    return inputs, outputs
