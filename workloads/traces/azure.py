"""Azure LLM inference traces of 2023 and 2024: csv with TIMESTAMP, ContextTokens, GeneratedTokens.

2023: naive times with 7 fraction digits. 2024: the offset +00:00, up to 6 fraction digits, none at all where
the fraction is zero. Naive times are taken as UTC. Source: github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from servetwin.workloads.spec import RequestSpec, WorkloadError
from servetwin.workloads.traces.trace import Trace, TraceFormat, row_error

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
HEADER = ",".join(COLUMNS)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIME_ALLOWED = "a time like 2023-11-16 18:17:03.9799600, or with +00:00 or Z behind it"
TOKENS_ALLOWED = "a whole number, 0 or more"

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_TOKENS = re.compile(r"\d{1,9}", re.ASCII)


class _Row(NamedTuple):
    number: int
    time_ns: int
    """Since 1970, UTC."""
    prompt_tokens: int
    output_tokens: int


def _read(path: str, lines: Iterator[str]) -> Trace:
    read = 0
    dropped: Counter[str] = Counter()
    rows: list[_Row] = []
    for cells in _data_rows(path, lines):
        read += 1
        row = _parse(path, read, cells)
        reason = _no_use(row)
        if reason:
            dropped[reason] += 1
        else:
            rows.append(row)
    return Trace(
        requests=_requests(rows), format=FORMAT.name, path=path, rows_read=read, rows_dropped=dict(dropped)
    )


def _data_rows(path: str, lines: Iterator[str]) -> Iterator[list[str]]:
    rows = (cells for cells in csv.reader(lines) if any(c.strip() for c in cells))
    header = next(rows)
    if tuple(c.strip() for c in header) != COLUMNS:
        raise WorkloadError(f"{path}: header {','.join(header)!r}: must be {HEADER!r}")
    try:
        yield from rows
    except csv.Error as e:
        raise WorkloadError(f"{path}: is not a csv file: {e}") from e


def _parse(path: str, number: int, cells: list[str]) -> _Row:
    if len(cells) < len(COLUMNS):
        raise row_error(path, number, COLUMNS[len(cells)], None, "there; the row ends before it")
    if len(cells) > len(COLUMNS):
        raise row_error(path, number, "row", ",".join(cells), f"the {len(COLUMNS)} fields {HEADER}")
    time_ns = _time_ns(cells[0])
    if time_ns is None:
        raise row_error(path, number, COLUMNS[0], cells[0], TIME_ALLOWED)
    for name, cell in zip(COLUMNS[1:], cells[1:], strict=True):
        if not _TOKENS.fullmatch(cell):
            raise row_error(path, number, name, cell, TOKENS_ALLOWED)
    return _Row(number, time_ns, int(cells[1]), int(cells[2]))


def _time_ns(text: str) -> int | None:
    """Integer arithmetic throughout: a float of seconds since 1970 would lose the last digits."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    date, clock, fraction, offset = match.groups()
    try:
        seconds = (datetime.fromisoformat(f"{date}T{clock}{offset or 'Z'}") - EPOCH) // timedelta(seconds=1)
    except ValueError:
        return None
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def _no_use(row: _Row) -> str | None:
    if not row.prompt_tokens:
        return "zero prompt tokens"
    if not row.output_tokens:
        return "zero output tokens"
    return None


def _requests(rows: list[_Row]) -> list[RequestSpec]:
    rows.sort(key=lambda row: row.time_ns)
    return [
        RequestSpec(
            request_id=f"row-{row.number:06d}",
            # Correctly rounded, so that rounding back to nanoseconds is exact for traces of up to 26 days.
            arrival_s=(row.time_ns - rows[0].time_ns) / 1_000_000_000,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            source_row=row.number,
        )
        for row in rows
    ]


FORMAT = TraceFormat(
    name="azure",
    looks_like=f"csv with the header {HEADER}",
    matches=lambda first_line: first_line.startswith("TIMESTAMP,"),
    read=_read,
)
