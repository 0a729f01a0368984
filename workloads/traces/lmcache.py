"""LMCache agent traces: JSON lines of model calls with a time in microseconds since 1970 and a session_id.

As published, a call holds its texts (`timestamp`, `input`, `output`), and a tokenizer counts them. With the texts
taken out it holds `timestamp_us`, `input_length`, `output_length` and `hash_ids`, one for each block of 16 tokens that
the prompt begins. Lines are not in order of time, so calls have no turn number: those of a session follow one another
in order of arrival. Source: LMCache/lmcache-agent-trace.
"""

from __future__ import annotations

from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.mooncake import check_ids
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.texts import text_of, tokenizer
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Fields

BLOCK_TOKENS = 16
LENGTH_KEYS = frozenset({"timestamp_us", "input_length", "output_length"})
TEXT_KEYS = frozenset({"timestamp", "input"})
"""The first ones: what comes behind a long input is not in the head."""


def _read(reading: Reading) -> None:
    if reading.source.head.keys >= LENGTH_KEYS:
        _read_lengths(reading)
    else:
        _read_texts(reading)


def _read_lengths(reading: Reading) -> None:
    block = reading.options.block_size or BLOCK_TOKENS

    def read(number: int, row: Fields) -> None:
        prompt = row.count("input_length")
        ids = row.ids("hash_ids") if row.has("hash_ids") else None
        if ids is not None and prompt:
            check_ids(ids, prompt, block)
        reading.rows.add(
            number,
            arrival_ns=row.time_ns("timestamp_us", unit="us"),
            session_id=row.text("session_id"),
            prompt_tokens=prompt,
            output_tokens=row.count("output_length"),
            prefix_ids=ids,
            prefix_block_tokens=None if ids is None else block,
        )

    each_object(reading.source, reading.rows, read)
    reading.about["block_size"] = block


def _read_texts(reading: Reading) -> None:
    tokenize = tokenizer(reading)

    def read(number: int, row: Fields) -> None:
        arrival_ns = row.time_ns("timestamp", unit="us")
        session = row.text("session_id")
        prompt, answer = tokenize(text_of(row, "input")), tokenize(text_of(row, "output"))
        reading.rows.add(
            number,
            arrival_ns=arrival_ns,
            session_id=session,
            prompt_tokens=len(prompt),
            prompt_token_ids=prompt,
            output_tokens=len(answer),
            output_token_ids=answer,
        )

    each_object(reading.source, reading.rows, read)


def _matches(head: Head) -> bool:
    return head.keys >= LENGTH_KEYS or (head.keys >= TEXT_KEYS and "input_length" not in head.keys)


FORMAT = TraceFormat(
    name="lmcache",
    looks_like="JSON lines with timestamp, input, output, session_id, or timestamp_us, input_length, hash_ids",
    matches=_matches,
    read=_read,
    uses=frozenset({"block_size", "tokenize"}),
)
