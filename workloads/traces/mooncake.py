"""Mooncake traces: JSON lines with timestamp, input_length, output_length and hash_ids, one id per 512 tokens.

Times are whole milliseconds since a start. `len(hash_ids)` is ceil(input_length / 512): the last id may cover a part of
its block only. Other tools write the same fields with other units and block sizes, so a file whose numbers do not
fit is refused, and `time_unit` and `block_size` say what it is. Optional: `session_id`, and `delay`, the ms between the
end of a session's previous request and this one (AIPerf, Dynamo). Source: kvcache-ai/Mooncake, FAST25 release.
"""

from __future__ import annotations

import math
from collections import Counter

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields

BLOCK_TOKENS = 512
KEYS = frozenset({"timestamp", "input_length", "output_length"})
OTHERS = frozenset({"chat_id", "parent_chat_id", "timestamp_us"})
"""Fields of formats that share the three above."""


def _read(reading: Reading) -> None:
    unit = reading.options.time_unit or "ms"
    block = reading.options.block_size or BLOCK_TOKENS
    turns: Counter[str] = Counter()
    fractions = False

    def read(number: int, row: Fields) -> None:
        nonlocal fractions
        prompt = row.count("input_length")
        output = row.count("output_length")
        ids = row.ids("hash_ids") if row.has("hash_ids") else None
        if ids is not None and prompt:
            check_ids(ids, prompt, block)
        fractions |= isinstance(row.row.get("timestamp"), float)
        session = row.text_or_none("session_id")
        reading.rows.add(
            number,
            arrival_ns=row.time_ns("timestamp", unit=unit),
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_ids=ids,
            prefix_block_tokens=None if ids is None else block,
            session_id=session,
            turn=None if session is None else turns[session],
            think_time_s=row.time_ns("delay", unit="ms") / 1e9 if row.has("delay") else None,
        )
        if session is not None:
            turns[session] += 1

    each_object(reading.source, reading.rows, read)
    if fractions and reading.options.time_unit is None:
        raise WorkloadError(
            f"{reading.source.path}: timestamp has fractions, so it may be in s or in ms: say which with --time-unit"
        )
    reading.about |= {"time_unit": unit, "block_size": block}


def check_ids(ids: list[int], prompt_tokens: int, block: int) -> None:
    """One id for each block that a prompt begins. Raises Damage."""
    expected = math.ceil(prompt_tokens / block)
    if len(ids) == expected:
        return
    likely = [b for b in (16, 32, 64, 128, 256, 512, 1024) if math.ceil(prompt_tokens / b) == len(ids)]
    hint = f"; {' or '.join(map(str, likely))} tokens per id would fit: --block-size" if likely else ""
    raise Damage(
        "hash_ids", f"{len(ids)} ids", f"{expected} for {prompt_tokens} tokens at {block} per id{hint}"
    )


def _matches(head: Head) -> bool:
    return head.keys >= KEYS and not OTHERS & head.keys


FORMAT = TraceFormat(
    name="mooncake",
    looks_like="JSON lines with timestamp, input_length, output_length, hash_ids",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "block_size"}),
)
