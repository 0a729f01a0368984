"""The formats that can be read. A new one is a module with a TraceFormat, and its place in this list."""

from __future__ import annotations

from pathlib import Path

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces import azure, jsonl
from servetwin.workloads.traces.source import open_lines
from servetwin.workloads.traces.trace import Trace, TraceFormat

FORMATS: tuple[TraceFormat, ...] = (azure.FORMAT, jsonl.FORMAT)
"""Tried in this order."""


def read_trace(path: str | Path) -> Trace:
    """All requests of a trace file; the format is told by its first line, .gz and .zst are unpacked.

    Foreign traces: times minus the earliest arrival, sorted stably. Our JSONL: times as written. A damaged
    row, a file without usable rows, or one of no known format raises WorkloadError.
    """
    with open_lines(path) as (first_line, lines):
        trace = _format_of(path, first_line).read(str(path), lines)
    if not trace.rows_read:
        raise WorkloadError(f"{path}: has a header but no rows")
    if not trace.requests:
        reasons = ", ".join(f"{count} {reason}" for reason, count in trace.rows_dropped.items())
        raise WorkloadError(f"{path}: none of its {trace.rows_read} rows can be used ({reasons})")
    return trace


def known_formats() -> str:
    """The formats and what they look like, for messages."""
    return "; ".join(f"{f.name} ({f.looks_like})" for f in FORMATS)


def _format_of(path: str | Path, first_line: str) -> TraceFormat:
    for trace_format in FORMATS:
        if trace_format.matches(first_line):
            return trace_format
    raise WorkloadError(
        f"{path}: begins with {first_line[:60]!r}, which is no known format: {known_formats()}"
    )
