"""An overloaded run is recognised while it goes on, and ended: its queue would only grow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.planning.one_run import EndRun

CHECKPOINTS = 20
"""A run is looked at whenever another twentieth of its requests has ended ..."""
LOOK_BACK = 3
"""... over the last three of them ..."""
FIRST_CHECKPOINT = 5
"""... from the fifth on."""
STEADINESS = 1.25
"""The pieces of the look-back take equally long up to this factor: the engine is up to speed."""
EXCESS = 1.1
"""Requests arrive faster than they end by more than this factor ..."""
FULL = 1.5
"""... and so many times what the engine can hold is present."""


class SaturatedError(EndRun):
    """Ends a run whose queue grows without bound; the log up to there is whole."""

    def __init__(self, ended: int, now_ns: int, served_rate: float) -> None:
        super().__init__(
            f"overloaded: ended after {ended:,} requests, {served_rate:.4g}/s served, at {now_ns / 1e9:.6g} s"
        )
        self.ended = ended
        self.now_ns = now_ns
        self.served_rate = served_rate


class SaturationWatch:
    """An `on_progress` that raises SaturatedError once a run is certain to be overloaded.

    `arrivals_ns`: instants [n] of all arrivals, in order. `room`: requests that can run at once at most (seats, or what
    the pool holds of requests of mean length): more than that can only wait. All three must hold: far more requests are
    present than there is room for, they come faster than they end, and they end at an even rate.
    """

    def __init__(self, arrivals_ns: NDArray[np.int64], room: int) -> None:
        self._arrivals = arrivals_ns
        self._room = room
        span_s = (int(arrivals_ns[-1]) - int(arrivals_ns[0])) / 1e9
        self._rate = (len(arrivals_ns) - 1) / span_s if span_s > 0 else np.inf
        self._piece = max(len(arrivals_ns) // CHECKPOINTS, 1)
        self._ended = 0
        self._instants: list[int] = []

    def __call__(self, num_steps: int, num_ended: int, now_ns: int) -> None:
        """Raises SaturatedError."""
        self._ended += num_ended
        while self._ended >= self._piece * (len(self._instants) + 1):
            self._instants.append(now_ns)
            self._look(now_ns)

    def _look(self, now_ns: int) -> None:
        if len(self._instants) < max(FIRST_CHECKPOINT, LOOK_BACK + 1):
            return
        pieces = np.diff(self._instants[-LOOK_BACK - 1 :]) / 1e9
        present = int(np.searchsorted(self._arrivals, now_ns, side="right")) - self._ended
        if pieces.min() <= 0 or pieces.max() > STEADINESS * pieces.min():
            return
        served = float(LOOK_BACK * self._piece / pieces.sum())
        # A burst passes: what was served in the second half of the time so far counts, too.
        half = self._instants[len(self._instants) // 2 - 1]
        longer = (len(self._instants) - len(self._instants) // 2) * self._piece / ((now_ns - half) / 1e9)
        if self._rate > EXCESS * max(served, longer) and present > FULL * self._room:
            raise SaturatedError(self._ended, now_ns, served)
