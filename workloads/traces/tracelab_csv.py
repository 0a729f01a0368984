"""TraceLab session traces: csv, one model round of a coding agent a row, played in a closed loop.

Columns in any order: session_id or id, [arrival_time], round_idx, prefix_len, input_len, output_len,
tool_wait_after_ms. Times are ms. A prompt is prefix_len tokens kept from the rounds before and input_len new ones; the
next round of a session is sent tool_wait_after_ms after this one has ended. Rounds stand in any order, by
round_idx; the arrival of the first one releases its session. prefix_len may be less than the context so far
(compaction). What the round before cannot supply of it is fresh: no hit is made up.
Source: github.com/uw-syfi/TraceLab.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from servetwin.workloads.spec import MAX_TOKENS, WorkloadError
from servetwin.workloads.traces.csv_rows import (
    COUNT,
    HEADER_SHOWN,
    TEXT,
    Column,
    CsvColumns,
    each_batch,
    time_in,
)
from servetwin.workloads.traces.csv_whole import Turns, gathered, selected, turns_of
from servetwin.workloads.traces.rows import BoolArray, IntArray
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage

SESSIONS = ("session_id", "id")
ARRIVAL, ROUND, PREFIX, INPUT, OUTPUT, WAIT = (
    "arrival_time",
    "round_idx",
    "prefix_len",
    "input_len",
    "output_len",
    "tool_wait_after_ms",
)


def _read(reading: Reading) -> None:
    session = _session_column(reading)
    timed = ARRIVAL in reading.source.head.columns
    reading.arrivals = "first turns" if timed else "none"
    counts = [Column(name, COUNT) for name in (ROUND, PREFIX, INPUT, OUTPUT)]
    times = [Column(name, time_in("ms")) for name in (WAIT, *((ARRIVAL,) if timed else ()))]
    columns = [Column(session, TEXT), *counts, *times]
    numbers = [column.name for column in (*counts, *times)]
    batches = each_batch(reading.source, reading.rows, columns)
    rounds = gathered(batches, arrays=numbers, lists=(session,))
    rounds = selected(rounds, _sound(reading, rounds, session), arrays=numbers, lists=(session,))
    _emit(reading, rounds, session)


def _session_column(reading: Reading) -> str:
    header = reading.source.head.columns
    found = [name for name in SESSIONS if name in header]
    if len(found) == 1:
        return found[0]
    how = "both" if found else "neither of"
    raise WorkloadError(
        f"{reading.source.path}: has {how} {' and '.join(SESSIONS)} in the header {','.join(header)[:HEADER_SHOWN]!r}: "
        f"must have one of them"
    )


def _sound(reading: Reading, rounds: CsvColumns, session: str) -> BoolArray:
    """Which rounds are not damaged; the others are accounted for."""
    sound = np.ones(len(rounds.numbers), dtype=np.bool_)
    for place, damage in sorted(_damages(rounds, session), key=lambda found: found[0]):
        if sound[place]:
            reading.rows.damaged(int(rounds.numbers[place]), damage)
        sound[place] = False
    return sound


def _damages(rounds: CsvColumns, session: str) -> Iterator[tuple[int, Damage]]:
    names = rounds.list(session)
    for place, name in enumerate(names):
        if name is None:
            yield place, Damage(session, name, "a text, not empty")
    prompt = rounds[PREFIX] + rounds[INPUT]
    for place in np.flatnonzero(prompt > MAX_TOKENS).tolist():
        yield (
            place,
            Damage(f"{PREFIX} + {INPUT}", int(prompt[place]), f"a whole number from 0 to {MAX_TOKENS:,}"),
        )
    turns = turns_of([name or "" for name in names], rounds[ROUND])
    twice = ~turns.begins & (rounds[ROUND] == rounds[ROUND][turns.previous])
    for place in np.flatnonzero(twice).tolist():
        before = int(rounds.numbers[turns.previous[place]])
        allowed = f"unique in session {names[place]!r}; row {before} has it too"
        yield place, Damage(ROUND, int(rounds[ROUND][place]), allowed)


def _emit(reading: Reading, rounds: CsvColumns, session: str) -> None:
    prompt = rounds[PREFIX] + rounds[INPUT]
    used = np.flatnonzero((prompt > 0) & (rounds[OUTPUT] > 0))
    names = rounds.list(session)
    turns = turns_of([names[place] for place in used.tolist()], rounds[ROUND][used])
    columns: dict[str, Any] = {"session_id": names}
    for name, values in _turns(rounds, used, turns).items():
        columns[name] = _spread(values, used, len(names))
    if reading.arrivals == "first turns":
        start_ns = np.zeros(len(names), dtype=np.int64)
        start_ns[used] = rounds[ARRIVAL][used][turns.first]
        columns["arrival_ns"] = start_ns
    else:
        columns["arrival_s"] = np.zeros(len(names))
    reading.rows.extend(rounds.numbers, prompt_tokens=prompt, output_tokens=rounds[OUTPUT], **columns)
    _say(reading, rounds, used, turns)


def _turns(rounds: CsvColumns, used: IntArray, turns: Turns) -> dict[str, list[Any]]:
    """Of the rounds that are used: place, pause before it, tokens that the round before supplies."""
    supplied = np.minimum(rounds[PREFIX][used], _context(rounds, used)[turns.previous]).tolist()
    wait_s = (rounds[WAIT][used][turns.previous] / 1e9).tolist()
    first = turns.begins.tolist()
    return {
        "turn": turns.place.tolist(),
        "think_time_s": [None if begins else value for begins, value in zip(first, wait_s, strict=True)],
        "context_tokens": [None if begins else value for begins, value in zip(first, supplied, strict=True)],
    }


def _context(rounds: CsvColumns, used: IntArray) -> IntArray:
    """Tokens of prompt and answer: all that the next round can keep."""
    tokens: IntArray = (rounds[PREFIX] + rounds[INPUT] + rounds[OUTPUT])[used]
    return tokens


def _spread(values: list[Any], places: IntArray, size: int) -> list[Any]:
    column: list[Any] = [None] * size
    for place, value in zip(places.tolist(), values, strict=True):
        column[place] = value
    return column


def _say(reading: Reading, rounds: CsvColumns, used: IntArray, turns: Turns) -> None:
    prefix, later = rounds[PREFIX][used], ~turns.begins
    counts = {
        "sessions begin with context that the file lacks: it is sent as fresh tokens": turns.begins
        & (prefix > 0),
        "rounds keep less than the round before them kept (compaction)": later
        & (prefix < prefix[turns.previous]),
        "rounds keep more than the round before them had: the rest is sent as fresh tokens": later
        & (prefix > _context(rounds, used)[turns.previous]),
    }
    if reading.arrivals == "first turns":
        start = rounds[ARRIVAL][used]
        counts["rounds state another arrival_time than the first of their session, which rules"] = (
            start != start[turns.first]
        )
    reading.notes += [f"{int(where.sum()):,} {what}" for what, where in counts.items() if where.any()]


def _matches(head: Head) -> bool:
    return {ROUND, PREFIX, INPUT, OUTPUT, WAIT} <= set(head.columns)


FORMAT = TraceFormat(
    name="tracelab csv",
    looks_like=f"csv with session_id or id, {ROUND}, {PREFIX}, {INPUT}, {OUTPUT}, {WAIT}",
    matches=_matches,
    read=_read,
)
