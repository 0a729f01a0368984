"""AIBrix workloads: JSON lines with a timestamp in milliseconds and the list of requests to be sent then.

Requests are counted as rows; the number of a row is that of its line. Keys come in two spellings, `prompt_length` and
`Prompt Length`. A request that does not say how long its answer is gets `output_tokens`, or is dropped. With a
tokenizer, prompts are counted by their text where it is there. Source: vllm-project/aibrix, benchmarks/generator.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from servetwin.workloads.traces.json_rows import numbered_lines
from servetwin.workloads.traces.nested import NO_REQUESTS, each_holder, fields_of, list_of
from servetwin.workloads.traces.output_lengths import OutputLengths
from servetwin.workloads.traces.request_ids import id_in_row
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.texts import text_of, tokenizer
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Fields

KEYS = frozenset({"timestamp", "requests"})
PROMPT_TEXT = ("prompt", "Prompt")
PROMPT = ("prompt_length", "Prompt Length")
OUTPUT = ("output_length", "Output Length")
SESSION = ("session_id", "Session ID")


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "ms"
    rows = reading.rows
    turns: Counter[str] = Counter()
    outputs = OutputLengths(reading, *OUTPUT)

    def read(line: int, fields: Fields) -> None:
        arrival_ns = fields.time_ns("timestamp", unit=unit)
        entries = list_of(fields, "requests")
        if not entries:
            rows.skip(line, NO_REQUESTS)
        for place, entry in enumerate(entries, start=1):
            with rows.row(line):
                request = fields_of("requests", entry)
                session = request.text_or_none(*SESSION)
                rows.add(
                    line,
                    request_id=id_in_row(line, place),
                    arrival_ns=arrival_ns,
                    output_tokens=outputs.of(request),
                    session_id=session,
                    turn=None if session is None else turns[session],
                    **_prompt(reading, request),
                )
                if session is not None:
                    turns[session] += 1

    each_holder(numbered_lines(reading.source), rows, read)
    outputs.check()
    reading.about["time_unit"] = unit


def _prompt(reading: Reading, request: Fields) -> dict[str, Any]:
    if reading.options.tokenize is not None and request.has(*PROMPT_TEXT):
        tokens = tokenizer(reading)(text_of(request, *PROMPT_TEXT))
        return {"prompt_tokens": len(tokens), "prompt_token_ids": tokens}
    return {"prompt_tokens": request.count(*PROMPT)}


def _matches(head: Head) -> bool:
    return head.keys >= KEYS


FORMAT = TraceFormat(
    name="aibrix",
    looks_like="JSON lines with timestamp and requests, each with prompt_length, output_length",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "tokenize", "output_tokens"}),
)
