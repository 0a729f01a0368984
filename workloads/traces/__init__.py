"""Trace files as requests: one reader per format, found by the content of the file."""

from servetwin.workloads.traces.formats import FORMATS, read_trace
from servetwin.workloads.traces.jsonl import to_jsonl, write_jsonl
from servetwin.workloads.traces.options import ReadOptions, Tolerance
from servetwin.workloads.traces.trace import Trace, TraceFormat

__all__ = [
    "FORMATS",
    "ReadOptions",
    "Tolerance",
    "Trace",
    "TraceFormat",
    "read_trace",
    "to_jsonl",
    "write_jsonl",
]
