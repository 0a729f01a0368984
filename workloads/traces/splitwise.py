"""Traces of splitwise-sim: csv with arrival_timestamp, prompt_size, token_size and a type for each request.

Times are seconds since a start. Requests of type 2 are those to a language model. A row stands for one request
(batch_size 1). The published traces draw prompt and answer independently of one another.
Source: github.com/Mutinifni/splitwise-sim.
"""

from __future__ import annotations

import numpy as np

from servetwin.workloads.traces.csv_rows import COUNT, Column, each_batch, time_in
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage

TYPE, ARRIVAL, BATCH, PROMPT, OUTPUT = (
    "request_type",
    "arrival_timestamp",
    "batch_size",
    "prompt_size",
    "token_size",
)
LLM = 2
OTHER_TYPE = f"request_type is not {LLM}"


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "s"
    reading.about["time_unit"] = unit
    counts = [Column(name, COUNT) for name in (TYPE, BATCH, PROMPT, OUTPUT)]
    for batch in each_batch(reading.source, reading.rows, [Column(ARRIVAL, time_in(unit)), *counts]):
        single = batch[BATCH] == 1
        for place in np.flatnonzero(~single).tolist():
            damage = Damage(BATCH, int(batch[BATCH][place]), "1: a row is one request")
            reading.rows.damaged(int(batch.numbers[place]), damage)
        reading.rows.extend(
            batch.numbers[single],
            arrival_ns=batch[ARRIVAL][single],
            prompt_tokens=batch[PROMPT][single],
            output_tokens=batch[OUTPUT][single],
            useless={OTHER_TYPE: batch[TYPE][single] != LLM},
        )


def _matches(head: Head) -> bool:
    return {TYPE, ARRIVAL, PROMPT, OUTPUT} <= set(head.columns)


FORMAT = TraceFormat(
    name="splitwise",
    looks_like=f"csv with {TYPE}, {ARRIVAL}, {BATCH}, {PROMPT}, {OUTPUT}",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit"}),
)
