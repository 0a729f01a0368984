"""Times that were recorded on a coarse clock: recognised, and spread again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.streams import stream

Times = NDArray[np.float64]

ON_TICKS = 0.98
"""Share of the gaps between different times that must be whole ticks."""
SLACK = 0.01
"""Of a tick: how far from whole ones they may be (Mooncake's ticks of 3 s lie within 3 ms)."""
COARSE = 0.01
"""Of the mean gap: a finer clock leaves the gaps as they are."""
CROWDED_REQUESTS, CROWDED_SHARE = 20, 2
"""Requests from which on ticks are crowded, and how many stand at each on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """Arrivals that share instants, because the clock that recorded them was coarse."""

    tick_s: float
    """Of the clock; where its ticks are not regular, the shortest distance of two instants."""
    instants: int
    requests: int

    @property
    def crowded(self) -> bool:
        """Whether gaps and dispersion are the clock's rather than the requests'."""
        return self.requests >= max(CROWDED_REQUESTS, CROWDED_SHARE * self.instants)


def find_ticks(times_s: Times) -> Ticks | None:
    """The ticks where requests share some and the gaps suffer from it; else None.

    times_s: ascending, shape [n].
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
    if tick_s <= COARSE * gaps_s.mean():
        return None
    return Ticks(tick_s=tick_s, instants=len(between_s) + 1, requests=len(times_s))


def find_crowded_ticks(requests: RequestColumns) -> Ticks | None:
    """Those of a trace that should be spread before it is replayed; else None."""
    ticks = find_ticks(_independent_times(requests))
    return ticks if ticks is not None and ticks.crowded else None


def spread_ticks(times_s: Times, tick_s: float) -> Times:
    """Each time moved forward by less than a tick at random, from a fixed seed; ascending, shape [n]."""
    shift = stream(0, "ticks").random(len(times_s))
    return np.sort(times_s + shift * tick_s)


def _independent_times(requests: RequestColumns) -> Times:
    """Sorted arrival times in seconds, of which requests of a session that stand at one instant have one together.

    They are its later turns, sent when the turn before has ended, and say nothing of a clock.
    """
    times_s = requests.arrival_s
    if not requests.has("session_id"):
        return times_s
    # A request without session is one of its own.
    keys = (i if name is None else name for i, name in enumerate(requests.values("session_id")))
    return np.sort(np.array([time for _, time in set(zip(keys, times_s.tolist(), strict=True))]))
