"""The time of an operator over tokens: a staircase where matrix tiles are filled, a line where elements are.

A GEMM takes as long for 257 tokens as for 272 (+44 % over 256 on the RTX 4090), since a tile is computed whole. So
within a tile the times of measured neighbours count, and no line is drawn across its edge. Which tile, or none, is what
foretells the measured points best, each from the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servetwin.sim.steptime.kernel_tables import TableError

Floats = NDArray[np.float64]
TILES = (None, 64, 128)
"""Tokens of a tile, in order of preference; None: no tiles."""


class Staircase:
    """`tokens` ascending, shape [n]; `times_us` above 0, shape [n]."""

    def __init__(self, tokens: ArrayLike, times_us: ArrayLike) -> None:
        self.tokens = np.asarray(tokens, dtype=np.float64)
        self._times_us = np.asarray(times_us, dtype=np.float64)
        if len(self.tokens) == 0:
            raise TableError("an operator needs one measured point at least")
        errors = [_cross_validated(self.tokens, self._times_us, tile) for tile in TILES]
        self.tile = TILES[int(np.argmin(errors))]

    @property
    def highest(self) -> float:
        """Most tokens measured."""
        return float(self.tokens[-1])

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Microseconds, in the shape of `tokens`; 0 for none. Beyond the measured region time grows with tokens."""
        wanted = np.asarray(tokens, dtype=np.float64)
        times = _at(self.tokens, self._times_us, wanted, self.tile)
        return np.where(wanted > 0, times, 0.0)


def _at(x: Floats, y: Floats, wanted: Floats, tile: int | None) -> Floats:
    if len(x) == 1:
        grown: Floats = y[0] * np.maximum(wanted / x[0], 1)
        return grown
    right = np.clip(np.searchsorted(x, wanted), 1, len(x) - 1)
    left = right - 1
    share = (wanted - x[left]) / (x[right] - x[left])
    times = y[left] + share * (y[right] - y[left])
    if tile is not None:
        own, behind, before = (np.ceil(a / tile) for a in (wanted, x[right], x[left]))
        times = np.where((behind == own) & (before != own), y[right], times)
        times = np.where((before == own) & (behind != own), y[left], times)
    times = np.where(wanted == x[right], y[right], times)
    times = np.where(wanted <= x[0], y[0], times)
    beyond: Floats = np.where(wanted > x[-1], y[-1] * wanted / x[-1], times)
    return beyond


def _cross_validated(x: Floats, y: Floats, tile: int | None) -> float:
    """Mean absolute log-error of the inner points, each left out."""
    if len(x) < 3:
        return 0.0
    foretold = [_at(np.delete(x, i), np.delete(y, i), x[i : i + 1], tile)[0] for i in range(1, len(x) - 1)]
    return float(np.abs(np.log(np.array(foretold) / y[1:-1])).mean())
