"""From what a user names to a workload: a preset, a trace, or our JSONL, and how it is sent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from servetwin.workloads.arrivals import Arrivals
from servetwin.workloads.checks import check_count, check_seed
from servetwin.workloads.closed_loop import ClosedLoop, Loop, as_workload
from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.presets import PRESETS, build_preset
from servetwin.workloads.spec import ListWorkload, WorkloadError
from servetwin.workloads.streams import stream
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
    rate_per_s: another request rate, infinite for all at once, for presets and for traces without times of their own;
    a trace that has them keeps them.
    seed: root seed of what is drawn.
    arrivals: the process that gives the times, in the place of a rate; with sessions, of their beginnings.
    loop: whether later turns of a session wait for the one before (`closed_loop.as_workload`).
    read: how to read a trace.
    Raises WorkloadError for whatever cannot be used.
    """
    if num_prompts is not None:
        check_count("num_prompts", num_prompts)
    check_seed(seed)
    if rate_per_s is not None and arrivals is not None:
        raise WorkloadError(f"rate_per_s {rate_per_s!r}: cannot stand beside arrivals, which have their own")
    if _is_preset(name_or_path):
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
    if rate_per_s is not None and math.isinf(rate_per_s):
        arrivals, rate_per_s = BenchServe(rate_per_s=rate_per_s), None
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
        raise WorkloadError(
            f"num_prompts {num_prompts}: must be at most {len(trace)}, the usable rows of {trace.path}"
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
    if arrivals is not None:
        requests, about["arrivals"] = sent_by(arrivals, requests, seed), repr(arrivals)
    if loop == "auto":
        loop = about.pop("loop", loop)
    if trace.notes:
        about["notes"] = list(trace.notes)
    return as_workload(requests, about, loop)


def _check_times(trace: Trace, arrivals: Arrivals | None, loop: Loop) -> None:
    if arrivals is None and trace.arrivals == "none":
        raise WorkloadError(
            f"{trace.path}: has no times: give a request rate (--request-rate; inf sends all at once)"
        )
    if arrivals is not None and trace.arrivals == "recorded":
        raise WorkloadError(
            f"{trace.path}: has arrivals of its own, which a request rate cannot change; "
            "`servetwin trace scale` writes it at another rate"
        )
    if loop == "open" and trace.arrivals == "first turns":
        raise WorkloadError(
            f"{trace.path}: loop 'open': its later turns have no times, they wait for their answers"
        )


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
    times_s = arrivals.times_s(len(starts), stream(seed, "arrivals"))
    return requests.with_column("arrival_s", times_s[np.array(places)]).in_order_of_arrival()
