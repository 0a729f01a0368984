"""From what a user names to a workload: a preset, a trace, or our JSONL, and how it is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from servetwin.workloads.arrivals import Arrivals, send_times_s
from servetwin.workloads.checks import check_count, check_seed
from servetwin.workloads.closed_loop import ClosedLoop, Loop, as_workload
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.presets import PRESETS, build_preset
from servetwin.workloads.spec import ArgumentError, ListWorkload, WorkloadError
from servetwin.workloads.statistics.arrivals import arrival_figures
from servetwin.workloads.statistics.ticks import find_crowded_ticks
from servetwin.workloads.statistics.warnings import replay_warnings
from servetwin.workloads.traces.formats import known_formats, read_trace
from servetwin.workloads.traces.options import ReadOptions
from servetwin.workloads.traces.source import naming
from servetwin.workloads.traces.trace import Trace
from servetwin.workloads.vllm_arrivals import BenchServe


def open_workload(
    name_or_path: str | Path,
    num_prompts: int | None = None,
    rate_per_s: float | None = None,
    seed: int = 0,
    *,
    arrivals: Arrivals | None = None,
    loop: Loop = "auto",
    read: ReadOptions | None = None,
) -> ListWorkload | ClosedLoop:
    """The workload behind a preset's name or a path (a Path is always a file or folder).

    num_prompts: the first ones in order of arrival (default: all of a trace, a preset's own number).
    rate_per_s: another rate, infinite for all at once, for presets and for traces without times of their own (a trace
    that has them keeps them): requests/s, with sessions their beginnings/s.
    seed: root seed of what is drawn.
    arrivals: the process that gives the times, in the place of a rate; with sessions, of their beginnings.
    loop: whether later turns of a session wait for the one before (`closed_loop.as_workload`).
    read: how to read a trace; a preset refuses it.
    Raises WorkloadError for whatever cannot be used.
    """
    if num_prompts is not None:
        check_count("num_prompts", num_prompts)
    check_seed(seed)
    if rate_per_s is not None and arrivals is not None:
        raise ArgumentError(
            "rate_per_s", f"{rate_per_s!r}: cannot stand beside arrivals, which have their own"
        )
    if _is_preset(name_or_path):
        if read is not None:
            raise ArgumentError("read", f"goes with a trace; {name_or_path!r} is a preset")
        return _open_preset(str(name_or_path), num_prompts, rate_per_s, seed, arrivals, loop)
    trace = read_trace(name_or_path, replace(read or ReadOptions(), seed=seed))
    return _workload_of(trace, num_prompts, _process(rate_per_s, arrivals), seed, loop)


def _is_preset(name_or_path: str | Path) -> bool:
    presets = ", ".join(PRESETS)
    with naming(name_or_path):
        exists = Path(name_or_path).exists()
    if isinstance(name_or_path, str) and name_or_path in PRESETS:
        if exists:
            raise WorkloadError(
                f"workload {name_or_path!r}: is a preset and a file here; the file is ./{name_or_path}, "
                f"the preset can only be used from another folder"
            )
        return True
    if not exists:
        raise WorkloadError(
            f"workload {str(name_or_path)!r}: is neither a file nor a preset. Presets: {presets}. "
            f"Trace formats: {known_formats()}"
        )
    return False


def _process(rate_per_s: float | None, arrivals: Arrivals | None) -> Arrivals | None:
    return BenchServe(rate_per_s=rate_per_s) if rate_per_s is not None else arrivals


def _open_preset(
    name: str,
    num_prompts: int | None,
    rate_per_s: float | None,
    seed: int,
    arrivals: Arrivals | None,
    loop: Loop,
) -> ListWorkload | ClosedLoop:
    built = build_preset(name, num_prompts, rate_per_s, seed)
    requests = built.requests
    assert isinstance(requests, RequestColumns), "a preset holds columns"
    about: dict[str, Any] = dict(built.about)
    if arrivals is not None:
        requests, about["arrivals"] = sent_by(arrivals, requests, seed), repr(arrivals)
        del about["rate_per_s"]
    return as_workload(requests, about, loop)


def _workload_of(
    trace: Trace, num_prompts: int | None, arrivals: Arrivals | None, seed: int, loop: Loop
) -> ListWorkload | ClosedLoop:
    if num_prompts is not None and num_prompts > len(trace):
        raise ArgumentError(
            "num_prompts", f"{num_prompts}: must be at most {len(trace)}, the usable rows of {trace.path}"
        )
    _check_times(trace, arrivals, loop)
    requests = trace.requests[:num_prompts]
    about: dict[str, Any] = {
        "format": trace.format,
        "path": trace.path,
        **trace.counts(),
        **trace.about,
        "requests": len(requests),
        "seed": seed,
    }
    if loop == "auto":
        loop = about.pop("loop", loop)
    if trace.notes:
        about["notes"] = list(trace.notes)
    if arrivals is not None:
        requests, about["arrivals"] = sent_by(arrivals, requests, seed), repr(arrivals)
        if requests.has("session_id"):
            about.setdefault("notes", []).append(rate_of_sessions(requests))
    elif warnings := _warnings(trace):
        about["warnings"] = warnings
    return as_workload(requests, about, loop)


def _warnings(trace: Trace) -> list[str]:
    """What `trace info` says of recorded times that mislead: of the whole trace, whatever part of it is sent."""
    if trace.arrivals == "none":
        return []
    ticks = find_crowded_ticks(trace.requests)
    return list(replay_warnings(arrival_figures(trace.requests.arrival_s), ticks))


def _check_times(trace: Trace, arrivals: Arrivals | None, loop: Loop) -> None:
    if arrivals is None and trace.arrivals == "none":
        raise WorkloadError(
            f"{trace.path}: has no times: give a request rate (--request-rate; inf sends all at once)"
        )
    if arrivals is not None and trace.arrivals == "recorded":
        problem = (
            f"cannot change the times that {trace.path} has of its own; "
            "`servetwin trace scale` writes it at another rate"
        )
        if isinstance(arrivals, BenchServe):
            raise ArgumentError("rate_per_s", f"{arrivals.rate_per_s!r}: {problem}")
        raise ArgumentError("arrivals", problem)
    if loop == "open" and trace.arrivals == "first turns":
        raise ArgumentError(
            "loop", f"'open': the later turns of {trace.path} have no times, they wait for their answers"
        )


def rate_of_sessions(requests: RequestColumns) -> str:
    """A sentence for whoever asked for a rate of a workload with sessions, about what it counts."""
    names = requests.values("session_id")
    begun = len(set(names) - {None}) + names.count(None)
    return f"the rate asked for is in sessions/s, later turns not counted: {begun:,} sessions, {len(names):,} requests"


def sent_by(arrivals: Arrivals, requests: RequestColumns, seed: int) -> RequestColumns:
    """The same requests at the times of a process: each one, or where there are sessions each session's beginning.

    The order is that of `requests`, in which a session begins with its first request.
    """
    if not len(requests):
        return requests
    sessions = requests.values("session_id")
    starts: dict[str | int, int] = {}
    # A request without session is one of its own.
    places = [starts.setdefault(i if name is None else name, len(starts)) for i, name in enumerate(sessions)]
    times_s = send_times_s(arrivals, len(starts), seed)
    return requests.with_column("arrival_s", times_s[np.array(places)]).in_order_of_arrival()
