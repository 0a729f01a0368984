"""A run of our own: a folder whose `workload.jsonl.zst` holds every request as it was received.

A run that failed or was interrupted holds those it had received until then. One that goes on, or was killed, is
refused: its file is not whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces import jsonl
from servetwin.workloads.traces.json_rows import parse_document
from servetwin.workloads.traces.source import Head, Source
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import shown

HEADER, WORKLOAD = "run.json", "workload.jsonl.zst"
WHOLE = ("complete", "failed")
"""States of a run that no longer writes."""


def _read(reading: Reading) -> None:
    folder = reading.source.file
    header = _header(reading)
    state = header.get("state")
    if state == "running":
        raise WorkloadError(
            f"{folder}: is a run that goes on or was killed: its {WORKLOAD} is not whole; wait for it to end"
        )
    if state not in WHOLE:
        raise WorkloadError(f"{folder / HEADER}: state {shown(state)}: must be one of {', '.join(WHOLE)}")
    if not (folder / WORKLOAD).is_file():
        raise WorkloadError(f"{folder}: is a run without {WORKLOAD}, from which it could be sent again")
    if state == "failed":
        reading.notes.append(
            f"the run ended early ({header.get('reason')}): these are the requests until then"
        )
    _take_over(reading, header)
    inside = replace(reading, source=Source(folder / WORKLOAD))
    jsonl.FORMAT.read(inside)
    reading.arrivals = inside.arrivals


def _take_over(reading: Reading, header: dict[str, Any]) -> None:
    """How the run sent its requests: the same loop again, unless told otherwise, and what else to say again."""
    workload, config = header.get("workload"), header.get("config")
    if isinstance(workload, dict) and workload.get("loop") in ("open", "closed"):
        reading.about["loop"] = workload["loop"]
    if isinstance(config, dict) and isinstance(limit := config.get("max_concurrency"), int):
        reading.notes.append(f"the run held requests back: say --max-concurrency {limit} to do so again")


def _header(reading: Reading) -> dict[str, Any]:
    source = Source(reading.source.file / HEADER)
    header = parse_document(source)
    if not isinstance(header, dict):
        raise WorkloadError(f"{source.path}: {shown(header)}: must be a JSON object")
    return header


def _matches(head: Head) -> bool:
    return head.folder is not None and (head.folder / HEADER).is_file()


FORMAT = TraceFormat(
    name="run folder",
    looks_like=f"a folder with {HEADER} and {WORKLOAD}",
    matches=_matches,
    read=_read,
)
