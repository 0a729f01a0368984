"""How sure a difference is: a bootstrap over blocks of consecutive requests, paired or not.

Requests that follow each other share queues and steps, so their latencies are no independent samples; drawing single
requests would make intervals too narrow. Blocks of consecutive requests are drawn instead (H. R. Künsch, "The jackknife
and the bootstrap for general stationary observations", 1989; here with blocks that do not overlap). Two runs of the
same requests are drawn with the same blocks, so that what both share cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESAMPLES = 1000
CELLS_AT_ONCE = 1 << 22
"""Numbers that are looked at together: bounds memory whatever the number of requests."""
WINDOW_DEVIATIONS = 6.0
"""Half of the ranks in which a percentile of a resample is looked for first, in standard deviations of its rank."""


class Interval(NamedTuple):
    """Where a quantity lies with the confidence asked for."""

    low: float
    high: float


class BlockBootstrap:
    """Resamples of `n` requests in order of arrival: whole blocks of neighbours, drawn with replacement.

    Each method takes one value for each request, shape [n], NaN where it has none, and gives the statistic of every
    resample, shape [resamples] (NaN for a resample without a value). The same object draws the same blocks each time:
    give it the values of both runs, and the differences are paired. Time is O(n log n + resamples x blocks) for a
    statistic, memory O(n).
    """

    def __init__(
        self, n: int, *, resamples: int = RESAMPLES, seed: int = 0, block_length: int | None = None
    ) -> None:
        """`block_length`: requests in a block; by default the cube root of n, the rate for variances."""
        if n < 1 or resamples < 1 or (block_length is not None and block_length < 1):
            raise ValueError(f"n {n}, resamples {resamples}, block_length {block_length} must be 1 or more")
        self.n, self.resamples, self.seed = n, resamples, seed
        self.block_length = block_length or ceil(n ** (1 / 3) - 1e-9)
        self.num_blocks = ceil(n / self.block_length)

    @cached_property
    def weights(self) -> NDArray[np.uint16]:
        """How often each block is drawn, shape [resamples, blocks]."""
        rng = np.random.default_rng(self.seed)
        weights = np.zeros((self.resamples, self.num_blocks), dtype=np.uint16)
        for rows in _chunks(self.resamples, self.num_blocks):
            count = rows.stop - rows.start
            drawn = rng.integers(0, self.num_blocks, size=(count, self.num_blocks))
            drawn += np.arange(count)[:, None] * self.num_blocks
            counts = np.bincount(drawn.ravel(), minlength=count * self.num_blocks)
            weights[rows] = counts.reshape(count, self.num_blocks)
        return weights

    def means(self, values: Floats) -> Floats:
        known, blocks = self._known(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            means: Floats = self._total(blocks, known) / self._total(blocks)
        return means

    def stds(self, values: Floats) -> Floats:
        """Standard deviations of the population."""
        known, blocks = self._known(values)
        # Around the mean: squares of large numbers would lose what differs.
        known = known - (known.mean() if len(known) else 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            count = self._total(blocks)
            variance = self._total(blocks, known**2) / count - (self._total(blocks, known) / count) ** 2
        return np.sqrt(np.maximum(variance, 0.0))

    def percentiles(self, values: Floats, p: float) -> Floats:
        """As `numpy.percentile` gives them for the values of a resample written out; p in 0..100."""
        return self.several_percentiles(values, [p])[0]

    def several_percentiles(self, values: Floats, ps: Sequence[float]) -> list[Floats]:
        """The same for several p, of values that are put in order once."""
        known, blocks = self._known(values)
        order = np.argsort(known, kind="stable")
        known, blocks = known[order], blocks[order]
        return [self._percentiles_of_sorted(known, blocks, p) for p in ps]

    def _percentiles_of_sorted(self, known: Floats, blocks: Ints, p: float) -> Floats:
        if not len(known):
            return np.full(self.resamples, np.nan)
        middle = int((len(known) - 1) * p / 100)
        deviation = self._rank_deviation(blocks, middle, p / 100)
        half = int(WINDOW_DEVIATIONS * deviation) + 16
        while True:
            window = slice(max(middle - half, 0), min(middle + half, len(known)))
            found = self._percentiles_within(known, blocks, p, window)
            if found is not None:
                return found
            half *= 4

    def _percentiles_within(self, known: Floats, blocks: Ints, p: float, window: slice) -> Floats | None:
        """From the values at the ranks of `window` alone; None where a resample needs others."""
        below = self._total(blocks[: window.start])
        totals = self._total(blocks)
        whole = (window.start, window.stop) == (0, len(known))
        place = (totals - 1) * (p / 100)
        found = np.full(self.resamples, np.nan)
        inside = np.append(known[window], np.nan)
        for rows in _chunks(self.resamples, window.stop - window.start):
            reached = self.weights[rows][:, blocks[window]].cumsum(axis=1, dtype=np.float64)
            reached += below[rows, None]
            ranks = np.floor(place[rows])
            low, high = (
                (reached <= rank[:, None]).sum(axis=1)
                for rank in (ranks, np.minimum(ranks + 1, totals[rows] - 1))
            )
            if not whole and ((below[rows] > ranks) | (high == reached.shape[1])).any():
                return None
            found[rows] = inside[low] + (inside[high] - inside[low]) * (place[rows] - ranks)
        return np.where(totals > 0, found, np.nan)

    def _rank_deviation(self, blocks: Ints, rank: int, fraction: float) -> float:
        """By how much the number of values below a rank differs from resample to resample."""
        below = np.bincount(blocks[:rank], minlength=self.num_blocks)
        sizes = np.bincount(blocks, minlength=self.num_blocks)
        return float(np.sqrt(((below - fraction * sizes) ** 2).sum()))

    def _known(self, values: Floats) -> tuple[Floats, Ints]:
        """Values that there are, and the block of each."""
        if len(values) != self.n:
            raise ValueError(f"{len(values)} values for a bootstrap of {self.n} requests")
        places = np.flatnonzero(~np.isnan(values))
        return values[places], places // self.block_length

    def _total(self, blocks: Ints, amounts: Floats | None = None) -> Floats:
        """Sum of the amounts (of ones by default) in every resample."""
        per_block = np.bincount(blocks, amounts, minlength=self.num_blocks).astype(np.float64)
        total = np.empty(self.resamples)
        for rows in _chunks(self.resamples, self.num_blocks):
            total[rows] = self.weights[rows].astype(np.float64) @ per_block
        return total


def interval(samples: Floats, level: float = 0.95) -> Interval | None:
    """Between the percentiles of the resamples that leave (1 - level) / 2 on either side; None without any."""
    known = samples[np.isfinite(samples)]
    if not len(known):
        return None
    outside = 100 * (1 - level) / 2
    low, high = np.percentile(known, (outside, 100 - outside))
    return Interval(float(low), float(high))


def _chunks(rows: int, width: int) -> list[slice]:
    """Rows in parts of about CELLS_AT_ONCE cells."""
    step = max(CELLS_AT_ONCE // max(width, 1), 1)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
