"""The time of one layer's attention call, from a table of measured calls.

A call holds prompt chunks, decode rows or both. The three are measured and fitted apart, since a mixed call is not the
sum of two lone ones (on the RTX 4090 it takes 1.4 times that sum at the median, 2.6 times at P90).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from servetwin.sim.steptime.kernel_tables import ATTENTION_AXES, TableError
from servetwin.sim.steptime.physical import PhysicalModel
from servetwin.sim.steptime.ratio_grid import RatioGrid

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
REGIMES = ("decode", "prefill", "mixed")
_AXES = {"decode": [2, 3], "prefill": [0, 1], "mixed": [0, 1, 2, 3]}
"""Columns of `ATTENTION_AXES` that a kind of call varies in."""


@dataclass(frozen=True)
class _Regime:
    physical: PhysicalModel
    ratio: RatioGrid
    highest: Floats
    """Of the measured coordinates of this regime, [axes]."""


class AttentionTimes:
    """Fitted to `rows` (columns ATTENTION_AXES and time_us). Raises TableError where a kind of call is missing."""

    def __init__(self, rows: pd.DataFrame) -> None:
        points = rows[list(ATTENTION_AXES)].to_numpy(dtype=np.float64)
        times = rows["time_us"].to_numpy(dtype=np.float64)
        kinds = regimes(points)
        self._regimes = {}
        for name in REGIMES:
            where = kinds == name
            if not where.any():
                raise TableError(f"attention: there are no {name} calls in the table")
            self._regimes[name] = _fit(name, points[where], times[where])

    def __call__(
        self, prefill_chunk: ArrayLike, kv_prefill: ArrayLike, n_decode: ArrayLike, kv_decode: ArrayLike
    ) -> Floats:
        """Microseconds of one layer's call, in the shape that the arguments have together; 0 for an empty call.

        prefill_chunk: new tokens of a prompt; kv_prefill: its tokens in the cache before; n_decode: decode rows;
        kv_decode: tokens that each of them reads.
        """
        given = np.broadcast_arrays(prefill_chunk, kv_prefill, n_decode, kv_decode)
        points = np.stack([np.asarray(axis, dtype=np.float64).ravel() for axis in given], axis=1)
        kinds = regimes(points)
        times = np.zeros(len(points))
        for name, regime in self._regimes.items():
            if (where := kinds == name).any():
                own = points[where]
                times[where] = regime.physical(_terms(name, own)) * regime.ratio(own[:, _AXES[name]])
        return times.reshape(given[0].shape)

    def physical_us(self, points: Floats) -> Floats:
        """The physical model alone, for comparison; `points` [n, 4] as ATTENTION_AXES."""
        kinds, times = regimes(points), np.zeros(len(points))
        for name, regime in self._regimes.items():
            if (where := kinds == name).any():
                times[where] = regime.physical(_terms(name, points[where]))
        return times

    def outside(self, points: Floats) -> Bools:
        """Which calls [n, 4] go beyond what was measured of their kind. Below the least that was, launching rules."""
        kinds, beyond = regimes(points), np.zeros(len(points), dtype=bool)
        for name, regime in self._regimes.items():
            where = kinds == name
            beyond[where] = (points[where][:, _AXES[name]] > regime.highest).any(axis=1)
        return beyond


def regimes(points: Floats) -> NDArray[np.str_]:
    """ "decode", "prefill", "mixed" or "empty" for calls [n, 4]."""
    prefill, decode = points[:, 0] > 0, points[:, 2] > 0
    return np.select([prefill & decode, prefill, decode], ["mixed", "prefill", "decode"], "empty")


def _fit(name: str, points: Floats, times: Floats) -> _Regime:
    physical = PhysicalModel.fit(_terms(name, points), times)
    own = points[:, _AXES[name]]
    ratio = RatioGrid(own, times / physical(_terms(name, points)))
    return _Regime(physical, ratio, own.max(axis=0))


def _terms(regime: str, points: Floats) -> Floats:
    """What a call's time is made of: launch, rows, query-key pairs, KV read, the longest row."""
    chunk, history, rows, context = points.T
    launch = np.ones(len(points))
    pairs, prefill_kv, decode_kv = chunk * (history + chunk / 2), history + chunk, rows * context
    if regime == "decode":
        return np.stack([launch, rows, decode_kv, context], axis=1)
    if regime == "prefill":
        return np.stack([launch, chunk, pairs, prefill_kv], axis=1)
    longest = np.maximum(prefill_kv, context)
    return np.stack([launch, chunk, pairs, prefill_kv, rows, decode_kv, longest], axis=1)
