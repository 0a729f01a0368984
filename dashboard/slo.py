"""Service level objectives: which requests kept all limits, and what became of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from servetwin.dashboard.figures import samples_ns
from servetwin.dashboard.run_columns import Numbers
from servetwin.sim.definitions import Timestamps

NS_PER_MS = 1e6


@dataclass(frozen=True)
class Limits:
    """Upper limits in ms; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def named(self) -> dict[str, float]:
        """Latency (of `figures.PER_REQUEST`) -> limit in ms."""
        limits = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True)
class Attainment:
    """How requests fared against limits."""

    strain: Numbers
    """Of each completed request, its largest latency in terms of its limit, [completed]: kept where <= 1."""
    ended: int
    """Requests that ended in any way: those that did not complete kept no limit."""
    duration_s: float | None

    @property
    def good(self) -> int:
        """Completed requests within all limits."""
        return int((self.strain <= 1).sum())

    @property
    def share(self) -> float | None:
        """Good ones among all that ended."""
        return self.good / self.ended if self.ended else None

    @property
    def goodput(self) -> float | None:
        """Good ones per second of the run (first arrival to last finish of a completed request)."""
        return self.good / self.duration_s if self.duration_s else None

    def curve(self, factors: Numbers) -> Numbers:
        """The share were all limits this many times what they are, [factors]."""
        within: Numbers = np.searchsorted(np.sort(self.strain), factors, side="right") / max(self.ended, 1)
        return within


def attainment(
    times: Timestamps, limits: Limits, metric_defs: str, ended: int, duration_s: float | None
) -> Attainment:
    """`times`: the completed requests. A request without a latency (TPOT of one token) keeps its limit."""
    strain = np.zeros(len(times.arrival))
    for name, limit_ms in limits.named().items():
        values = np.nan_to_num(samples_ns(metric_defs, name, times))
        # A limit that is kept to the ns is kept, whatever a division makes of it.
        ratio = np.where(values <= limit_ms * NS_PER_MS, np.minimum(values / (limit_ms * NS_PER_MS), 1), 0)
        missed = values > limit_ms * NS_PER_MS
        ratio[missed] = np.maximum(values[missed] / (limit_ms * NS_PER_MS), np.nextafter(1, 2))
        strain = np.maximum(strain, ratio)
    return Attainment(strain, ended, duration_s)


def over_time(
    arrival_s: Numbers, good: Numbers, window: tuple[float, float], bins: int
) -> tuple[Numbers, Numbers, Numbers]:
    """By time of arrival: where bins begin [bins], requests in each, and the share of good ones (NaN: none came)."""
    span = window if window[1] > window[0] else (window[0], window[0] + 1)
    came, edges = np.histogram(arrival_s, bins=bins, range=span)
    kept, _ = np.histogram(arrival_s[good], bins=bins, range=span)
    return edges[:-1], came, np.where(came > 0, kept / np.maximum(came, 1), np.nan)
