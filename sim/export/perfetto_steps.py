"""The steps of a run as trace events: slices, counters, evictions.

Steps that follow each other are slices of one track, with what the host, the worker and the device do in them nested
inside. Where steps overlap (asynchronous scheduling), host, worker and device have tracks of their own. Measured times
of a live run may overlap a little, for what is measured as one thing holds parts of another: such a slice begins where
the one before it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.export.trace_events import Event, Track, counter, instant, process, slice_event, thread
from servetwin.sim.step_rows import expanded
from servetwin.sim.tables import Tables, replica_of
from servetwin.sim.units import NS_PER_S

Int64s = NDArray[np.int64]
TIMES = (
    "start_s",
    "end_s",
    "prepare_start_s",
    "prepare_s",
    "device_start_s",
    "device_s",
    "schedule_s",
    "host_s",
)
COUNTS = (
    *("prefill_tokens", "decode_tokens", "rows", "decode_rows", "running", "waiting", "used_blocks"),
    *("cached_free_blocks", "free_blocks", "preemptions", "evictions"),
)
STEPS, SCHEDULE, UPDATE, WORKER, DEVICE = 1, 2, 3, 4, 5
"""Numbers of the tracks of an engine."""
LANES = {"schedule": SCHEDULE, "update": UPDATE, "prepare": WORKER, "device": DEVICE}


class Window(NamedTuple):
    """What is exported: everything that touches it."""

    from_ns: int
    to_ns: int

    def touches(self, start_ns: int, end_ns: int) -> bool:
        return end_ns >= self.from_ns and start_ns <= self.to_ns


def engine_pid(replica: int) -> int:
    """Number of the process that stands for an engine."""
    return replica + 1


def step_events(log: Tables, window: Window) -> Iterator[Event]:
    """Of all engines, part by part."""
    overlapping = _overlapping(log)
    for replica, overlaps in overlapping.items():
        yield from _heads(replica, overlaps)
    shown: dict[int, dict[str, tuple[int, ...]]] = {replica: {} for replica in overlapping}
    ends: dict[Track, int] = {}
    for part in log.iter_parts("steps"):
        replica = replica_of(part)
        for step in _steps(part, window):
            lanes = _on_lanes if overlapping[replica] else _one_behind_another
            yield from lanes(engine_pid(replica), step, ends)
            yield from _counters(engine_pid(replica), step, shown[replica])
            if step.counts["evictions"]:
                track = Track(engine_pid(replica), DEVICE if overlapping[replica] else STEPS)
                yield instant(track, "evictions", step.times["start_s"], {"blocks": step.counts["evictions"]})


def count_steps(log: Tables) -> Iterator[Int64s]:
    """When steps start, part by part, in ns."""
    for part in log.iter_parts("steps"):
        yield _ns(expanded(part, ["start_s"])["start_s"].to_numpy())


class _Step(NamedTuple):
    """One step in ns, and its counts."""

    times: dict[str, int]
    counts: dict[str, int]
    predicted_ms: float | None


def _steps(part: Any, window: Window) -> Iterator[_Step]:
    table = expanded(part, [*TIMES, *COUNTS, "predicted_s"])
    times = {name: _ns(table[name].to_numpy()) for name in TIMES}
    inside = np.flatnonzero((times["end_s"] >= window.from_ns) & (times["start_s"] <= window.to_ns))
    time_rows = zip(*(times[name][inside].tolist() for name in TIMES), strict=True)
    count_rows = zip(*(table[name].to_numpy()[inside].tolist() for name in COUNTS), strict=True)
    predicted = table["predicted_s"].to_numpy()[inside].tolist()
    for time_row, count_row, seconds in zip(time_rows, count_rows, predicted, strict=True):
        yield _Step(
            dict(zip(TIMES, time_row, strict=True)),
            dict(zip(COUNTS, count_row, strict=True)),
            None if np.isnan(seconds) else 1000 * seconds,
        )


def _ns(seconds: NDArray[np.float64]) -> Int64s:
    return np.rint(np.nan_to_num(seconds) * NS_PER_S).astype(np.int64)


def _overlapping(log: Tables) -> dict[int, bool]:
    """Whether an engine ever begins a step before the one in front of it has ended, by replica."""
    found: dict[int, bool] = {}
    last_end: dict[int, int] = {}
    for part in log.iter_parts("steps"):
        replica = replica_of(part)
        table = expanded(part, ["start_s", "end_s"])
        starts, ends = (_ns(table[name].to_numpy()) for name in ("start_s", "end_s"))
        before = np.concatenate([[last_end.get(replica, 0)], ends[:-1]])
        found[replica] = found.get(replica, False) or bool((starts < before).any())
        if len(ends):
            last_end[replica] = int(ends[-1])
    return dict(sorted(found.items()))


def _heads(replica: int, overlaps: bool) -> Iterator[Event]:
    pid = engine_pid(replica)
    yield from process(pid, f"engine {replica}", replica)
    lanes = {SCHEDULE: "host: schedule", UPDATE: "host: update", WORKER: "worker: prepare", DEVICE: "device"}
    names = lanes if overlaps else {STEPS: "steps"}
    for tid, name in names.items():
        yield from thread(Track(pid, tid), name, tid)


def _kind(counts: dict[str, int]) -> str:
    if not counts["rows"]:
        return "empty"
    if counts["prefill_tokens"] and counts["decode_tokens"]:
        return "prefill and decode"
    return "prefill" if counts["prefill_tokens"] else "decode"


def _args(step: _Step) -> dict[str, Any]:
    args: dict[str, Any] = {name: step.counts[name] for name in COUNTS}
    args["busy_ms"] = (step.times["prepare_s"] + step.times["device_s"]) / 1e6
    if step.predicted_ms is not None:
        args["predicted_ms"] = step.predicted_ms
    return args


def _phases(step: _Step) -> dict[str, tuple[int, int]]:
    """What is done in a step, from and to, without what takes no time."""
    times = step.times
    schedule, update = times["schedule_s"], times["host_s"] - times["schedule_s"]
    phases = {
        "schedule": (times["start_s"], times["start_s"] + schedule),
        "prepare": (times["prepare_start_s"], times["prepare_start_s"] + times["prepare_s"]),
        "device": (times["device_start_s"], times["device_start_s"] + times["device_s"]),
        "update": (times["end_s"] - update, times["end_s"]),
    }
    return {name: (start, end) for name, (start, end) in phases.items() if end > start}


def _one_behind_another(pid: int, step: _Step, ends: dict[Track, int]) -> Iterator[Event]:
    track, times = Track(pid, STEPS), step.times
    begin = max(times["start_s"], ends.get(track, times["start_s"]))
    ends[track] = times["end_s"]
    yield slice_event(track, _kind(step.counts), begin, times["end_s"], _args(step))
    phases = _phases(step)
    if len(phases) > 1:
        for name, (start, end) in phases.items():
            begin, end = max(start, begin), min(end, times["end_s"])
            if end > begin:
                yield slice_event(track, name, begin, end)
                begin = end


def _on_lanes(pid: int, step: _Step, ends: dict[Track, int]) -> Iterator[Event]:
    for name, (start, end) in _phases(step).items():
        track = Track(pid, LANES[name])
        begin = max(start, ends.get(track, start))
        if end > begin:
            ends[track] = end
            is_device = name == "device"
            yield slice_event(
                track,
                _kind(step.counts) if is_device else name,
                begin,
                end,
                _args(step) if is_device else None,
            )


def _counters(pid: int, step: _Step, shown: dict[str, tuple[int, ...]]) -> Iterator[Event]:
    """Those that have changed since the step before."""
    counts = step.counts
    values = {
        "requests": {"running": counts["running"], "waiting": counts["waiting"]},
        "KV blocks": {
            "used": counts["used_blocks"],
            "cached free": counts["cached_free_blocks"],
            "free": counts["free_blocks"],
        },
        "tokens per step": {"prefill": counts["prefill_tokens"], "decode": counts["decode_tokens"]},
        "preemptions per step": {"preemptions": counts["preemptions"]},
    }
    for name, series in values.items():
        now = tuple(series.values())
        if shown.get(name) != now:
            shown[name] = now
            yield counter(pid, name, step.times["start_s"], series)
