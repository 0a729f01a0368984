"""Events of the Chrome trace format (JSON), which Perfetto and chrome://tracing open. Times are in microseconds.

Source: "Trace Event Format" of the Chromium project; Perfetto's notes on it: slices of one track nest or follow each
other, and never overlap otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Event = dict[str, Any]


class Track(NamedTuple):
    """A row of the picture: a thread of a process, in the words of the format."""

    pid: int
    tid: int


def microseconds(ns: int) -> float:
    """Whole nanoseconds stay whole: three decimals."""
    return ns / 1000


def process(pid: int, name: str, order: int) -> list[Event]:
    """Names a process and says where it stands."""
    return [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": order}},
    ]


def thread(track: Track, name: str, order: int) -> list[Event]:
    """Names a track and says where it stands in its process."""
    head = {"ph": "M", "pid": track.pid, "tid": track.tid}
    return [
        head | {"name": "thread_name", "args": {"name": name}},
        head | {"name": "thread_sort_index", "args": {"sort_index": order}},
    ]


def slice_event(
    track: Track, name: str, start_ns: int, end_ns: int, args: Mapping[str, Any] | None = None
) -> Event:
    """From an instant to another one."""
    event: Event = {
        "ph": "X",
        "pid": track.pid,
        "tid": track.tid,
        "name": name,
        "ts": microseconds(start_ns),
        "dur": microseconds(end_ns - start_ns),
    }
    return event if args is None else event | {"args": args}


def counter(pid: int, name: str, at_ns: int, values: Mapping[str, float]) -> Event:
    """Values from an instant on."""
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": microseconds(at_ns), "args": values}


def instant(track: Track, name: str, at_ns: int, args: Mapping[str, Any] | None = None) -> Event:
    """Something without a duration."""
    event: Event = {
        "ph": "i",
        "s": "t",
        "pid": track.pid,
        "tid": track.tid,
        "name": name,
        "ts": microseconds(at_ns),
    }
    return event if args is None else event | {"args": args}


def flow(name: str, number: int, begin: tuple[Track, int], end: tuple[Track, int]) -> list[Event]:
    """An arrow from the slice that covers an instant of one track to one of another; `number` is its own."""
    events = []
    for phase, (track, at_ns) in (("s", begin), ("f", end)):
        event: Event = {
            "ph": phase,
            "pid": track.pid,
            "tid": track.tid,
            "id": number,
            "name": name,
            "cat": name,
            "ts": microseconds(at_ns),
        }
        events.append(event | {"bp": "e"} if phase == "f" else event)
    return events
