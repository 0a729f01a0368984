"""Reads JSON: one object a line, or one document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.json_stream import JsonStream
from servetwin.workloads.traces.json_text import parse_json
from servetwin.workloads.traces.rows import Rows
from servetwin.workloads.traces.source import Source
from servetwin.workloads.traces.values import Damage, Fields


def numbered_lines(source: Source) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, counted from 1."""
    return enumerate((line for line in source.lines() if line.strip()), start=1)


def parse_object(line: str) -> dict[str, Any]:
    """The JSON object that a line is. Raises Damage."""
    try:
        value = parse_json(line)
    except json.JSONDecodeError as e:
        raise Damage("row", line.strip(), f"JSON ({e})") from e
    if not isinstance(value, dict):
        raise Damage("row", value, "a JSON object")
    return value


def each_object(source: Source, rows: Rows, read: Callable[[int, Fields], None]) -> None:
    """Calls `read` with the number and the fields of each row, and accounts for what it raises."""
    for number, line in numbered_lines(source):
        with rows.row(number):
            read(number, Fields(parse_object(line)))


def parse_document(source: Source) -> Any:
    """The one JSON value that the file is."""
    try:
        return parse_json(source.document())
    except json.JSONDecodeError as e:
        raise WorkloadError(f"{source.path}: is not JSON: {e}") from e


def document_rows(source: Source) -> Iterator[Any]:
    """The elements of the JSON list that the file is, one after another."""
    stream = JsonStream(source)
    if stream.peek() != "[":
        raise WorkloadError(f"{source.path}: begins with {stream.peek()!r}: must be a JSON list")
    try:
        yield from stream.elements()
        stream.end()
    except Damage as e:
        raise WorkloadError(f"{source.path}: is not JSON: {e}") from e
