"""Any csv with a header: columns named as the fields of a request, or mapped onto them (`ReadOptions.columns`).

Two lengths are wanted; everything else may be missing. Times in a column of our own name are in seconds, as the name
says; those in a column of another name have the unit of `time_unit`, or are dates. Without arrivals all
requests stand at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces import csv_rows
from servetwin.workloads.traces.csv_kinds import SIGNED, optional
from servetwin.workloads.traces.csv_rows import Column, CsvColumns, Kind
from servetwin.workloads.traces.csv_whole import selected
from servetwin.workloads.traces.rows import BoolArray
from servetwin.workloads.traces.source import Head, Source
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage

ARRIVAL, PROMPT, OUTPUT, THINK = "arrival_s", "prompt_tokens", "output_tokens", "think_time_s"
LENGTHS = (PROMPT, OUTPUT)
OTHERS: dict[str, Kind] = {
    "request_id": csv_rows.TEXT,
    "session_id": csv_rows.TEXT,
    "client_id": csv_rows.TEXT,
    "cache_salt": csv_rows.TEXT,
    "turn": optional(csv_rows.COUNT),
    "context_tokens": optional(csv_rows.COUNT),
    "priority": optional(SIGNED),
}
TIME_NAMES = frozenset(
    {"arrival", "arrival_time", "arrived_at", "arrival_timestamp", "timestamp", "time", "ts", "start_time"}
)
"""What columns of arrivals are called elsewhere: not to be taken for lengths only."""
FIELDS = (ARRIVAL, *LENGTHS, THINK, *OTHERS)


def _read(reading: Reading) -> None:
    header = csv_rows.read_header(next(filter(str.strip, reading.source.lines()), ""))
    names = _names(reading, header)
    kinds = {field: _kind(reading, field, name) for field, name in names.items()}
    _check_unit_is_used(reading, names)
    if ARRIVAL not in names:
        reading.arrivals = "none"
    wanted = [Column(name, kinds[field]) for field, name in names.items()]
    arrays = [names[field] for field in (ARRIVAL, *LENGTHS) if field in names]
    lists = [name for field, name in names.items() if field not in (ARRIVAL, *LENGTHS)]
    first_row_of: dict[str, int] = {}
    for batch in csv_rows.each_batch(reading.source, reading.rows, wanted):
        sound = _sound(reading, batch, names, first_row_of)
        rows = batch if sound.all() else selected(batch, sound, arrays=arrays, lists=lists)
        _emit(reading, rows, names)


def _names(reading: Reading, header: list[str]) -> dict[str, str]:
    """Field -> column of the file. A column is read as one field only, the mapped one."""
    path, mapped = reading.source.path, dict(reading.options.columns)
    shown = ", ".join(header)[: csv_rows.HEADER_SHOWN]
    for field, name in mapped.items():
        if field not in FIELDS:
            raise WorkloadError(f"{path}: column for {field!r}: must be for one of {', '.join(FIELDS)}")
        if name not in header:
            raise WorkloadError(f"{path}: column {name!r} (for {field}) is not in the header {shown!r}")
    own = {field: field for field in FIELDS if field in header and field not in mapped.values()}
    names = own | mapped
    for field in LENGTHS:
        if field not in names:
            raise WorkloadError(f"{path}: no column for {field}: say which of {shown} it is")
    unused = [name for name in header if name not in names.values()]
    if ARRIVAL not in names and (times := [name for name in unused if name.lower() in TIME_NAMES]):
        raise WorkloadError(
            f"{path}: column {times[0]!r} may hold times: map it with arrival={times[0]} (--columns, --time-unit)"
        )
    if unused:
        reading.notes.append(f"columns not used: {', '.join(unused)[: csv_rows.HEADER_SHOWN]}")
    if "context_tokens" in names and "session_id" not in names:
        raise WorkloadError(f"{path}: a column for context_tokens: must come with one for session_id")
    if len(set(names.values())) < len(names):
        raise WorkloadError(f"{path}: columns {names}: must be different ones")
    return names


def _kind(reading: Reading, field: str, name: str) -> Kind:
    if field in LENGTHS:
        return csv_rows.FLOAT_COUNT
    if field in OTHERS:
        return OTHERS[field]
    if field == ARRIVAL and _holds_dates(reading.source, name):
        reading.about["dates"] = True
        return csv_rows.DATE
    unit = "s" if name == field else reading.options.time_unit
    if unit is None:
        raise WorkloadError(
            f"{reading.source.path}: column {name!r} (for {field}): its unit is not known: say it with --time-unit"
        )
    if name != field:
        reading.about["time_unit"] = unit
    return csv_rows.time_in(unit) if field == ARRIVAL else optional(csv_rows.time_in(unit))


def _holds_dates(source: Source, name: str) -> bool:
    """Whether the first row has a date there."""
    lines = filter(str.strip, source.lines())
    header, row = (csv_rows.read_header(next(lines, "")) for _ in range(2))
    cells = dict(zip(header, row, strict=False))
    try:
        csv_rows.DATE.one(name, cells.get(name, ""))
    except Damage:
        return False
    return True


def _check_unit_is_used(reading: Reading, names: dict[str, str]) -> None:
    unit = reading.options.time_unit
    dated = "dates" in reading.about
    used = [f for f in (ARRIVAL, THINK) if names.get(f, f) != f and not (f == ARRIVAL and dated)]
    if unit is not None and not used:
        raise WorkloadError(
            f"{reading.source.path}: time_unit has no use: no column has times in a unit that is left open"
        )


def _sound(
    reading: Reading, batch: CsvColumns, names: dict[str, str], first_row_of: dict[str, int]
) -> BoolArray:
    """Which rows agree with themselves and the rows before; the others are accounted for."""
    sound = np.ones(len(batch.numbers), dtype=np.bool_)
    for place, damage in _damages(batch, names, first_row_of):
        if sound[place]:
            reading.rows.damaged(int(batch.numbers[place]), damage)
        sound[place] = False
    return sound


def _damages(
    batch: CsvColumns, names: dict[str, str], first_row_of: dict[str, int]
) -> Iterator[tuple[int, Damage]]:
    if "request_id" in names:
        for place, identity in enumerate(batch.list(names["request_id"])):
            number = int(batch.numbers[place])
            before = number if identity is None else first_row_of.setdefault(identity, number)
            if identity is None or before != number:
                allowed = "a text, not empty" if identity is None else f"unique; row {before} has it too"
                yield place, Damage(names["request_id"], identity, allowed)
    if "context_tokens" in names:
        sessions, prompts = batch.list(names["session_id"]), batch.list(names[PROMPT])
        for place, context in enumerate(batch.list(names["context_tokens"])):
            if context is not None and (sessions[place] is None or context > prompts[place]):
                allowed = f"at most {PROMPT} ({prompts[place]}), and empty where there is no session_id"
                yield place, Damage(names["context_tokens"], context, allowed)


def _emit(reading: Reading, rows: CsvColumns, names: dict[str, str]) -> None:
    columns: dict[str, Any] = {
        field: rows.list(name) for field, name in names.items() if field not in (ARRIVAL, THINK, *LENGTHS)
    }
    if THINK in names:
        columns[THINK] = [None if ns is None else ns / 1e9 for ns in rows.list(names[THINK])]
    if ARRIVAL in names:
        columns["arrival_ns"] = rows[names[ARRIVAL]]
    else:
        columns[ARRIVAL] = np.zeros(len(rows.numbers))
    prompt, output = rows[names[PROMPT]], rows[names[OUTPUT]]
    reading.rows.extend(rows.numbers, prompt_tokens=prompt, output_tokens=output, **columns)


def _matches(head: Head) -> bool:
    return set(LENGTHS) <= set(head.columns)


FORMAT = TraceFormat(
    name="csv",
    looks_like=f"csv with {PROMPT} and {OUTPUT}, or with columns mapped onto them",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "columns"}),
)
