"""Simulated time held back to a pace that people can watch, and a folder that is written while they do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.units import NS_PER_S

NAP_S = 0.05
"""Between two looks for a Ctrl-C."""
FLUSH_S, FLUSH_SHARE = 0.25, 0.02
"""What has happened is written so often, or after this share of the time so far: few parts for a long run."""


def check_pace(per_s: float | None) -> None:
    """Raises UsageError for what is no pace."""
    if per_s is not None and not (math.isfinite(per_s) and per_s > 0):
        raise UsageError(f"--pace {per_s} must be simulated seconds per second, above 0")


class Pace:
    """Told of every step, it lets at most `per_s` simulated seconds pass in one second, and flushes the log.

    Time that was lost (a stopped process, slow steps) is not caught up.
    """

    def __init__(self, per_s: float | None, flush: Callable[[], None], on_nap: Callable[[], None]) -> None:
        """`per_s`: None does not hold back and only flushes. `on_nap` may raise, which ends the run."""
        self._per_s = per_s
        self._flush, self._on_nap = flush, on_nap
        self._begun_s = self._flushed_s = time.monotonic()
        self._last_ns, self._due_s = 0, self._begun_s

    def at(self, now_ns: int) -> None:
        """Simulated time has come to `now_ns`: returns when it may be that late."""
        if self._per_s is not None:
            passed_s = (now_ns - self._last_ns) / NS_PER_S / self._per_s
            self._last_ns = now_ns
            self._due_s = max(self._due_s, time.monotonic() - NAP_S) + passed_s
            while (rest_s := self._due_s - time.monotonic()) > 0:
                self._flush_if_due()
                time.sleep(min(rest_s, NAP_S))
                self._on_nap()
        self._flush_if_due()

    def _flush_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s - self._flushed_s >= max(FLUSH_S, FLUSH_SHARE * (now_s - self._begun_s)):
            self._flush()
            self._flushed_s = now_s
