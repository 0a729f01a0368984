"""Times that were recorded on a coarse clock: recognised, and spread again."""

from __future__ import annotations

import numpy as np

from servetwin.workloads.arrivals import FloatArray
from servetwin.workloads.streams import stream

ON_TICKS = 0.98
"""Share of the gaps between different times that must be whole ticks."""
SLACK = 0.01
"""Of a tick: how far from whole ones they may be (Mooncake's ticks of 3 s lie within 3 ms)."""
COARSE = 0.01
"""Of the mean gap: a finer clock leaves the gaps as they are."""


def find_tick_s(times_s: FloatArray) -> float | None:
    """The tick of the clock in seconds, where requests share ticks and the gaps suffer from it; else None.

    times_s: ascending, shape [n]. Without a regular tick, times that several requests share are spread over the
    shortest gap between different times.
    """
    gaps_s = np.diff(times_s)
    between_s = gaps_s[gaps_s > 0]
    if len(between_s) in (0, len(gaps_s)):
        return None
    shortest_s = float(between_s.min())
    tick_s = float(between_s[between_s < (1 + 2 * SLACK) * shortest_s].mean())
    ticks = between_s / tick_s
    on_ticks = np.abs(ticks - np.rint(ticks)) <= SLACK * np.maximum(np.rint(ticks), 1)
    if on_ticks.mean() < ON_TICKS:
        tick_s = shortest_s
    return tick_s if tick_s > COARSE * gaps_s.mean() else None


def spread_ticks(times_s: FloatArray, tick_s: float) -> FloatArray:
    """Each time moved forward by less than a tick at random, from a fixed seed; ascending, shape [n]."""
    shift = stream(0, "ticks").random(len(times_s))
    return np.sort(times_s + shift * tick_s)
