"""Other workloads from one: faster or slower, a part of it, with spread arrivals. The order of arrival stays.

Requests come as RequestColumns (`read_trace(path).requests`) or as any list of RequestSpec; what is given is not
changed. Impossible wishes raise WorkloadError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.checks import check_between, check_count, check_positive
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.spec import MAX_TIME_S, ArgumentError, RequestSpec, WorkloadError
from servetwin.workloads.statistics.ticks import Times, find_crowded_ticks
from servetwin.workloads.streams import stream


def as_columns(requests: Sequence[RequestSpec]) -> RequestColumns:
    """In order of arrival. Raises WorkloadError where there are none."""
    if not len(requests):
        raise WorkloadError("requests: must be at least one")
    columns = requests if isinstance(requests, RequestColumns) else RequestColumns.of(requests)
    return columns.in_order_of_arrival()


def scaled(requests: Sequence[RequestSpec], *, speed_up: float) -> RequestColumns:
    """All times divided by `speed_up`: arrivals, think times and times of giving up; 2 sends twice as fast."""
    check_positive("speed_up", speed_up)
    columns = as_columns(requests)
    _check_last("speed_up", speed_up, columns, speed_up)
    for name in ("arrival_s", "think_time_s", "abort_s"):
        columns = _each(columns, name, lambda seconds: min(seconds / speed_up, MAX_TIME_S))
    return columns


def scaled_to_rate(requests: Sequence[RequestSpec], *, rate_per_s: float) -> RequestColumns:
    """The speed-up at which requests / span is `rate_per_s`."""
    return scaled(requests, speed_up=speed_up_for(requests, rate_per_s))


def speed_up_for(requests: Sequence[RequestSpec], rate_per_s: float) -> float:
    """By how much requests / span is short of `rate_per_s`. Raises ArgumentError where there is no span."""
    check_positive("rate_per_s", rate_per_s)
    columns = as_columns(requests)
    span_s = span_of(columns)
    if span_s <= 0:
        raise ArgumentError(
            "rate_per_s", f"{rate_per_s!r}: all requests arrive at one time, there is no rate to scale"
        )
    speed_up = rate_per_s * (span_s / len(columns))
    _check_last("rate_per_s", rate_per_s, columns, speed_up)
    return speed_up


def _check_last(name: str, value: float, columns: RequestColumns, speed_up: float) -> None:
    """Refuses what was asked for where its speed-up leads to times beyond the allowed ones, or is no number."""
    last_s = float(columns.arrival_s[-1]) / speed_up if speed_up else inf
    if last_s > MAX_TIME_S or speed_up == inf:
        raise ArgumentError(
            name,
            f"{value!r}: puts the last arrival at {last_s:.6g} s; it must be above 0 and at most {MAX_TIME_S:g} s",
        )


def span_of(requests: RequestColumns) -> float:
    """Last minus first arrival in seconds, of requests in order of arrival."""
    return float(requests.arrival_s[-1] - requests.arrival_s[0])


def cut(
    requests: Sequence[RequestSpec], *, start_s: float = 0.0, end_s: float | None = None
) -> RequestColumns:
    """What arrives from `start_s` on and before `end_s` (None: to the end); `start_s` becomes time 0."""
    check_between("start_s", start_s, 0, MAX_TIME_S)
    if end_s is not None and not end_s > start_s:
        raise ArgumentError("end_s", f"{end_s!r}: must be after the start of the window, {start_s:g} s")
    columns = as_columns(requests)
    times_s = columns.arrival_s
    first, end = np.searchsorted(times_s, (start_s, np.inf if end_s is None else end_s)).tolist()
    if first == end:
        # One of them is to blame: the end, where it comes before everything.
        name, bound = ("end_s", end_s) if first == 0 else ("start_s", start_s)
        window = f"from {start_s:g} s on" if end_s is None else f"from {start_s:g} s to {end_s:g} s"
        raise ArgumentError(
            name,
            f"{bound!r}: nothing arrives {window}; arrivals are from {times_s[0]:.6g} to {times_s[-1]:.6g} s",
        )
    kept = columns[first:end].with_column("arrival_s", times_s[first:end] - start_s)
    # Who gave up before the window stays someone who gives up at once.
    return _each(kept, "abort_s", lambda seconds: max(seconds - start_s, 0.0))


def first_of(requests: Sequence[RequestSpec], n: int) -> RequestColumns:
    """The first `n` in order of arrival. Raises ArgumentError where there are fewer."""
    check_count("n", n)
    columns = as_columns(requests)
    if n > len(columns):
        raise ArgumentError("n", f"{n}: must be at most {len(columns)}, the requests there are")
    return columns[:n]


def ticks_spread(requests: Sequence[RequestSpec], *, seed: int = 0) -> RequestColumns:
    """Quantised arrivals drawn uniformly from their tick: up to the next instant, at most a tick away.

    Requests keep their order; those of one session that stand at one instant move together. Times of giving up move
    with their arrivals. Raises WorkloadError for arrivals that are not quantised.
    """
    columns = as_columns(requests)
    times_s = columns.arrival_s
    ticks = find_crowded_ticks(columns)
    if ticks is None:
        raise WorkloadError(
            f"arrivals are not quantised: {len(np.unique(times_s)):,} instants among {len(times_s):,} requests"
        )
    instants, instant = np.unique(times_s, return_inverse=True)
    widths = np.minimum(np.append(np.diff(instants), ticks.tick_s), ticks.tick_s)
    shift_s = widths[instant] * _ordered_draws(instant, _units(columns, instant), seed)
    moved = columns.with_column("arrival_s", times_s + shift_s)
    if moved.has("abort_s"):
        pairs = zip(columns.values("abort_s"), shift_s.tolist(), strict=True)
        moved = moved.with_column("abort_s", [None if t is None else t + shift for t, shift in pairs])
    return moved.in_order_of_arrival()


def _units(columns: RequestColumns, instant: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each request, the same for those of one session at one instant, growing with their first."""
    if not columns.has("session_id"):
        return np.arange(len(columns))
    units: dict[object, int] = {}
    names = zip(columns.values("session_id"), instant.tolist(), strict=True)
    return np.array(
        [
            units.setdefault(i if name is None else (name, tick), len(units))
            for i, (name, tick) in enumerate(names)
        ]
    )


def _ordered_draws(instant: NDArray[np.int64], unit: NDArray[np.int64], seed: int) -> Times:
    """A number in [0, 1) for each request: independent ones for the units, sorted within an instant."""
    draws = stream(seed, "ticks").random(int(unit.max()) + 1)
    instant_of_unit = np.empty(len(draws), dtype=np.int64)
    instant_of_unit[unit] = instant
    ordered: Times = draws[np.lexsort((draws, instant_of_unit))]
    return ordered[unit]


def _each(columns: RequestColumns, name: str, change: Callable[[float], float]) -> RequestColumns:
    """One column of seconds changed where it has a value."""
    if not columns.has(name):
        return columns
    return columns.with_column(name, [None if v is None else change(v) for v in columns.values(name)])
