"""Decode rows of unequal KV lengths: longer than as many rows of their mean length, shorter than of the longest.

    t(batch) = t(mean) + alpha x (t(longest) - t(mean))

Alpha depends on the rows and on whether a prompt chunk runs in the same call, far less on how unequal the rows are. It
is the median of the measured batches in which few rows are long, as in real ones, interpolated over log(rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
FEW_LONG_ROWS = 0.13
"""Share of long rows in the batches that count: one in eight, the least there is for eight rows."""


class SkewTimes:
    """`rows`: columns n (decode rows), ratio (share of long ones), pc (tokens of the chunk beside them), alpha."""

    def __init__(self, rows: pd.DataFrame) -> None:
        few = rows[rows["ratio"] <= FEW_LONG_ROWS]
        self._decode = _medians(few[few["pc"] == 0])
        self._mixed = _medians(few[few["pc"] > 0])

    def alpha(self, decode_rows: Floats, mixed: NDArray[np.bool_]) -> Floats:
        """[n]; `mixed`: a chunk runs in the same call. 0 where nothing was measured."""
        return np.where(mixed, _at(self._mixed, decode_rows), _at(self._decode, decode_rows))


def _medians(rows: pd.DataFrame) -> tuple[Floats, Floats]:
    """(rows, alpha) by rows; noise below 0 counts as 0, for a longer row never makes a batch faster."""
    alpha = rows.groupby("n")["alpha"].median()
    return alpha.index.to_numpy(dtype=np.float64), np.maximum(alpha.to_numpy(dtype=np.float64), 0.0)


def _at(measured: tuple[Floats, Floats], decode_rows: Floats) -> Floats:
    rows, alpha = measured
    if not len(rows):
        return np.zeros(decode_rows.shape)
    return np.interp(np.log(np.maximum(decode_rows, 1)), np.log(rows), alpha)
