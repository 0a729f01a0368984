"""Seconds live in files and on screens, integer nanoseconds inside the simulator: the one place that converts."""

from __future__ import annotations

NS_PER_S = 1_000_000_000


def seconds_to_ns(seconds: float) -> int:
    """The nearest whole nanosecond."""
    return round(seconds * NS_PER_S)


def ns_to_seconds(ns: int) -> float:
    return ns / NS_PER_S
