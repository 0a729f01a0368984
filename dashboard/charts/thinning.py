"""Fewer points, the same shape: no browser draws a million, and no screen has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_POINTS = 1_000
"""Points per trace."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Values = np.ndarray[tuple[int], np.dtype[Any]]
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


def min_max(y: Values, limit: int) -> Indices:
    """Indices of the smallest and the largest value in each of limit / 2 equal pieces of y, in order."""
    if len(y) <= limit:
        return np.arange(len(y))
    pieces = limit // 2
    length = len(y) // pieces
    whole = y[: pieces * length].reshape(pieces, length)
    starts = np.arange(pieces) * length
    kept = [starts + whole.argmin(axis=1), starts + whole.argmax(axis=1)]
    if len(rest := y[pieces * length :]):
        kept.append(pieces * length + np.array([rest.argmin(), rest.argmax()]))
    return np.unique(np.concatenate(kept))
