"""BurstGPT: csv with Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type.

The third release puts Session ID and Elapsed time after the first column, so columns are found by name, never by
place. Times are seconds since the midnight, local time, before the first request of the first file. Failed requests
have 0 response tokens. Elapsed time lasts from the sending of a request to the end of its answer, which tells how long
the user of a session took until the next request. Source: github.com/HPMLL/BurstGPT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.csv_kinds import optional
from servetwin.workloads.traces.csv_rows import COUNT, TEXT, Column, CsvColumns, each_batch, time_in
from servetwin.workloads.traces.csv_whole import gathered, selected, turns_of
from servetwin.workloads.traces.models import MODELS_SHOWN, OTHER_MODEL
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import shown

ARRIVAL, MODEL, PROMPT, OUTPUT = "Timestamp", "Model", "Request tokens", "Response tokens"
SESSION, ELAPSED = "Session ID", "Elapsed time"
NUMBERS = (ARRIVAL, PROMPT, OUTPUT)
FAILED = "failed request"
LOCAL_TIME = "times count from a midnight in a time zone that is not said: only their differences are used"


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "s"
    reading.about["time_unit"] = unit
    reading.notes.append(LOCAL_TIME)
    header = reading.source.head.columns
    lists = (SESSION, *(name for name in (ELAPSED,) if name in header)) if SESSION in header else ()
    columns = [Column(ARRIVAL, time_in(unit)), Column(PROMPT, COUNT), Column(OUTPUT, COUNT)]
    columns += [Column(name, TEXT if name == SESSION else optional(time_in(unit))) for name in lists]
    if reading.options.model is not None:
        columns.append(Column(MODEL, TEXT))
    batches = each_batch(reading.source, reading.rows, columns)
    if reading.options.model is not None:
        batches = _of_model(reading, reading.options.model, batches, lists)
    if not lists:
        for batch in batches:
            _emit(reading, batch)
        return
    whole = gathered(batches, arrays=NUMBERS, lists=lists)
    _emit(reading, whole, **_sessions(reading, whole, with_ends=ELAPSED in lists))


def _of_model(
    reading: Reading, model: str, batches: Iterable[CsvColumns], lists: Iterable[str]
) -> Iterator[CsvColumns]:
    """The rows of one model. The others were not asked for, so leaving them out is no offence in a strict reading."""
    reading.about["model"] = model
    found: dict[str | None, None] = {}
    for batch in batches:
        names = batch.list(MODEL)
        found |= dict.fromkeys(names)
        mine = np.array([name == model for name in names], dtype=np.bool_)
        others = batch.numbers[~mine].tolist()
        reading.rows.read += len(others)
        reading.rows.not_asked_for(others, OTHER_MODEL)
        yield selected(batch, mine, arrays=NUMBERS, lists=lists)
    if model not in found:
        others = ", ".join(shown(name) for name in list(found)[:MODELS_SHOWN])
        raise WorkloadError(
            f"{reading.source.path}: model {shown(model)}: must be one of its models: {others}"
        )


def _emit(reading: Reading, rows: CsvColumns, **sessions: list[Any]) -> None:
    reading.rows.extend(
        rows.numbers,
        arrival_ns=rows[ARRIVAL],
        prompt_tokens=rows[PROMPT],
        output_tokens=rows[OUTPUT],
        useless={FAILED: rows[OUTPUT] == 0},
        **sessions,
    )


def _sessions(reading: Reading, rows: CsvColumns, *, with_ends: bool) -> dict[str, list[Any]]:
    """Session, turn and think time of each row: None where it has no session, failed or asked nothing."""
    names, size = rows.list(SESSION), len(rows.numbers)
    used = (rows[OUTPUT] > 0) & (rows[PROMPT] > 0)
    members = [place for place in range(size) if used[place] and names[place] is not None]
    turns = turns_of([names[place] for place in members], rows[ARRIVAL][members])
    arrival = rows[ARRIVAL].tolist()
    elapsed = rows.list(ELAPSED) if with_ends else [None] * size
    sessions: list[Any] = [None] * size
    turn: list[Any] = [None] * size
    think_s: list[Any] = [None] * size
    overlapping = 0
    for place, number, previous in zip(members, turns.place.tolist(), turns.previous.tolist(), strict=True):
        sessions[place], turn[place] = names[place], number
        before = members[previous] if previous >= 0 else None
        if before is None or elapsed[before] is None:
            continue
        think_ns = arrival[place] - arrival[before] - elapsed[before]
        overlapping += think_ns < 0
        think_s[place] = think_ns / 1e9 if think_ns >= 0 else None
    if overlapping:
        reading.notes.append(
            f"{overlapping:,} requests of sessions were sent before the answer to the one before them had ended: "
            f"they have no think time"
        )
    return {"session_id": sessions, "turn": turn, "think_time_s": think_s}


def _matches(head: Head) -> bool:
    return {ARRIVAL, PROMPT, OUTPUT} <= set(head.columns)


FORMAT = TraceFormat(
    name="burstgpt",
    looks_like=f"csv with {ARRIVAL}, {MODEL}, {PROMPT}, {OUTPUT}, sometimes {SESSION} and {ELAPSED}",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "model"}),
)
