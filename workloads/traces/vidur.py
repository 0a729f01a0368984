"""Vidur traces: csv with arrived_at, num_prefill_tokens, num_decode_tokens, or with the two lengths only.

Times are seconds since a start. Lengths may be fractions, as Vidur's own length generators draw them; they are cut to
whole tokens, as Vidur's replay cuts them. Further columns (num_total_tokens, pd_ratio) follow from the two lengths.
Source: github.com/microsoft/vidur.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.workloads.spec import MAX_TOKENS, WorkloadError
from servetwin.workloads.traces.csv_rows import NUMBER, Column, Kind, each_batch, time_in
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage

if TYPE_CHECKING:
    import pyarrow as pa

ARRIVAL, PROMPT, OUTPUT = "arrived_at", "num_prefill_tokens", "num_decode_tokens"


def _one_length(name: str, cell: str) -> float:
    length: float = NUMBER.one(name, cell)
    if not 0 <= length <= MAX_TOKENS:
        raise Damage(name, cell, f"a number from 0 to {MAX_TOKENS:,}")
    return length


def _many_lengths(cells: pa.StringArray) -> Any:
    lengths = NUMBER.many(cells)
    if lengths is None:
        return None
    numbers = np.asarray(lengths)
    return numbers if ((numbers >= 0) & (numbers <= MAX_TOKENS)).all() else None


LENGTH = Kind(_one_length, _many_lengths)


def _read(reading: Reading) -> None:
    timed = ARRIVAL in reading.source.head.columns
    unit = reading.options.time_unit or "s"
    columns = [Column(PROMPT, LENGTH), Column(OUTPUT, LENGTH)]
    if timed:
        columns.append(Column(ARRIVAL, time_in(unit)))
        reading.about["time_unit"] = unit
    elif reading.options.time_unit is not None:
        raise WorkloadError(f"{reading.source.path}: time_unit has no use: the file has lengths only")
    else:
        reading.arrivals = "none"
    fractions = 0
    for batch in each_batch(reading.source, reading.rows, columns):
        prompt, output = batch[PROMPT].astype(np.int64), batch[OUTPUT].astype(np.int64)
        fractions += int(((prompt != batch[PROMPT]) | (output != batch[OUTPUT])).sum())
        arrival = {"arrival_ns": batch[ARRIVAL]} if timed else {"arrival_s": np.zeros(len(prompt))}
        reading.rows.extend(batch.numbers, prompt_tokens=prompt, output_tokens=output, **arrival)
    if fractions:
        reading.notes.append(f"{fractions:,} rows have lengths with fractions: cut to whole tokens")


def _matches(head: Head) -> bool:
    return {PROMPT, OUTPUT} <= set(head.columns)


FORMAT = TraceFormat(
    name="vidur",
    looks_like=f"csv with the header {ARRIVAL},{PROMPT},{OUTPUT}, or with the two lengths only",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit"}),
)
