"""A run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, written piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import orjson

from servetwin.sim.export.perfetto_requests import request_events
from servetwin.sim.export.perfetto_steps import Window, count_steps, step_events
from servetwin.sim.tables import Tables, ns_array
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EVENTS = 1_000_000
"""About 150 MB of JSON, which the browser still opens."""
PER_STEP, PER_REQUEST = 5, 9
"""Events, about."""
EVENTS_AT_ONCE = 2048


class Cut(NamedTuple):
    """What of a run is exported, and whether that is less than was asked for."""

    window: Window
    capped: bool


def window_of(log: Tables, from_s: float | None, to_s: float | None, max_events: int = MAX_EVENTS) -> Cut:
    """The window asked for (seconds of simulated time, None: no bound), or as much of it as `max_events` allow."""
    window = Window(
        -(1 << 62) if from_s is None else round(from_s * NS_PER_S),
        (1 << 62) if to_s is None else round(to_s * NS_PER_S),
    )
    starts = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *count_steps(log)]))
    arrivals = np.sort(ns_array(log.requests.arrival_s)).astype(np.int64)
    both = [_inside(times, window) for times in (starts, arrivals)]
    if PER_STEP * len(both[0]) + PER_REQUEST * len(both[1]) <= max_events:
        return Cut(window, False)
    times = np.concatenate(both)
    events = np.concatenate([np.full(len(both[0]), PER_STEP), np.full(len(both[1]), PER_REQUEST)])
    order = np.argsort(times, kind="stable")
    last = int(np.searchsorted(np.cumsum(events[order]), max_events, side="right"))
    return Cut(window._replace(to_ns=int(times[order[max(last - 1, 0)]])), True)


def _inside(times: NDArray[np.int64], window: Window) -> NDArray[np.int64]:
    return times[np.searchsorted(times, window.from_ns) : np.searchsorted(times, window.to_ns, side="right")]


def perfetto_json(log: Tables, window: Window) -> Iterator[bytes]:
    """The JSON object in pieces. Raises LogTooOldError."""
    events = chain(step_events(log, window), request_events(log, window))
    before = b'{"displayTimeUnit":"ms","traceEvents":[\n'
    while piece := list(islice(events, EVENTS_AT_ONCE)):
        yield before + b",\n".join(map(orjson.dumps, piece))
        before = b",\n"
    yield b"\n]}\n"
