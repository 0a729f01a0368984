"""Fits step times to measurements: `fit_tables` to per-kernel tables."""

from __future__ import annotations

from pathlib import Path

from servetwin.sim.steptime.kernel_tables import read_tables
from servetwin.sim.steptime.kernel_times import KernelTimes


def fit_tables(folder: str | Path) -> KernelTimes:
    """The operators' times of a folder of per-kernel tables (`sim/steptime/kernel_tables.py` has the layout).

    `.attention_us(prefill_chunk, kv_prefill, n_decode, kv_decode)` and `.dense_us(layer, tokens)` are microseconds of
    one call. Tables may lack rows. Raises TableError, OSError.
    """
    return KernelTimes.of(read_tables(folder))
