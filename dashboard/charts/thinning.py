"""Fewer points, the same shape: no browser draws a million, and no screen has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

MAX_POINTS = 2_000
"""Points per trace."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


def keep(x: Floats, series: Sequence[Floats], limit: int = MAX_POINTS) -> Indices:
    """Indices [<= about limit] that keep the shape of every series over x, the first and the last among them.

    All series get the same indices: stacked areas need common points. x must not fall.
    """
    if len(x) <= limit:
        return np.arange(len(x))
    chosen = [_pick(x, y, max(limit // len(series), 8)) for y in series]
    return np.unique(np.concatenate([*chosen, np.array([0, len(x) - 1])]))


def _pick(x: Floats, y: Floats, limit: int) -> Indices:
    try:
        from tsdownsample import MinMaxLTTBDownsampler
    except ImportError:
        return min_max(y, limit)
    downsampler = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]
    picked: Indices = downsampler.downsample(x, y, n_out=limit).astype(np.int64)
    return picked


def min_max(y: Floats, limit: int) -> Indices:
    """Indices of the smallest and the largest value in each of limit / 2 equal pieces of y, in order."""
    edges = np.linspace(0, len(y), limit // 2 + 1).astype(np.int64)
    pieces = list(pairwise(edges))
    lows = [start + int(y[start:stop].argmin()) for start, stop in pieces]
    highs = [start + int(y[start:stop].argmax()) for start, stop in pieces]
    return np.unique(np.array(lows + highs, dtype=np.int64))
