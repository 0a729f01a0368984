"""Mooncake traces: JSON lines with timestamp, input_length, output_length and hash_ids, one id per 512 tokens.

Times are whole milliseconds since a start. `len(hash_ids)` is ceil(input_length / 512): the last id may cover a part of
its block only. Other tools write the same fields with other units and block sizes, so a file whose numbers do not
fit is refused, and `time_unit` and `block_size` say what it is. Source: kvcache-ai/Mooncake, FAST25 release.

Dynamo's mooncake-delta looks alike, but a later turn's row holds what is new: it is read only when asked for by name.
AIPerf and Dynamo add `session_id` and, in the place of the timestamp of a later turn, `delay`: the time between the end
of the session's request before and this one. A file without any timestamp has no arrival times.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.options import TimeUnit
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import ArrivalTimes, Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields

BLOCK_TOKENS = 512
KEYS = frozenset({"input_length", "output_length"})
TIMES = frozenset({"timestamp", "session_id", "delay"})
"""One of them at least stands beside the lengths, but in files without times."""
UNTIMED = KEYS | {"hash_ids"}
"""All that a row of a file without times has."""
OTHERS = frozenset({"chat_id", "parent_chat_id", "timestamp_us"})
"""Fields of formats that share those above."""
UNHEEDED = frozenset({"wait_for", "branches", "prefix_reset"})
"""How requests of Dynamo's agentic variant depend on one another."""


def _read_deltas(reading: Reading) -> None:
    _read(reading, deltas=True)
    reading.notes.append(
        "a later turn's row is what is new in it: its prompt begins with prompt and answer before"
    )


def _read(reading: Reading, *, deltas: bool = False) -> None:
    unit = reading.options.time_unit or "ms"
    block = reading.options.block_size or BLOCK_TOKENS
    sessions = _Sessions(unit)
    context: dict[str, int] = {}  # session -> tokens of its last prompt and answer
    """Session -> tokens of its last prompt and answer, where rows are deltas."""
    fractions = False
    unheeded: Counter[str] = Counter()

    def read(number: int, row: Fields) -> None:
        nonlocal fractions
        prompt = row.count("input_length")
        output = row.count("output_length")
        ids = row.ids("hash_ids") if row.has("hash_ids") else None
        if ids is not None and prompt:
            check_ids(ids, prompt, block)
        columns = sessions.columns(row)
        session = columns["session_id"]
        if deltas and session in context:
            # The ids name what is new, not how the prompt begins.
            ids, columns["context_tokens"] = None, context[session]
            prompt += context[session]
        reading.rows.add(
            number,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix_ids=ids,
            prefix_block_tokens=None if ids is None else block,
            **columns,
        )
        sessions.emitted(columns)
        fractions |= isinstance(row.row.get("timestamp"), float)
        unheeded.update(name for name in UNHEEDED if row.row.get(name))
        if session is not None:
            context[session] = prompt + output

    each_object(reading.source, reading.rows, read)
    if fractions and reading.options.time_unit is None:
        raise WorkloadError(
            f"{reading.source.path}: timestamp has fractions, so it may be in s or in ms: say which with --time-unit"
        )
    reading.arrivals = sessions.arrivals
    reading.about |= {"time_unit": unit, "block_size": block}
    if unheeded:
        counted = ", ".join(f"{name} of {unheeded[name]:,} rows" for name in sorted(unheeded))
        reading.notes.append(f"{counted}: not followed; these requests are sent at their own times")


@dataclass
class _Sessions:
    """When requests are sent: at a time of their own, or after the one before in their session."""

    unit: TimeUnit
    arrivals: ArrivalTimes = "recorded"
    _timed: bool | None = None
    """Whether first turns have timestamps; None: none has been seen."""
    _start_ns: dict[str, int] = field(default_factory=dict)
    _turns: Counter[str] = field(default_factory=Counter)

    def columns(self, row: Fields) -> dict[str, Any]:
        """The columns of `row` that say when it is sent. Raises Damage."""
        session = row.text_or_none("session_id")
        return {
            "arrival_ns": self._arrival_ns(row, session),
            "session_id": session,
            "turn": None if session is None else self._turns[session],
            "think_time_s": row.time_ns("delay", unit=self.unit) / 1e9 if row.has("delay") else None,
        }

    def emitted(self, columns: dict[str, Any]) -> None:
        """The request with these columns was not dropped."""
        if columns["session_id"] is not None:
            self._turns[columns["session_id"]] += 1

    def _arrival_ns(self, row: Fields, session: str | None) -> int:
        if not row.has("timestamp") and session in self._start_ns:
            self.arrivals = "first turns" if self._timed else "none"
            return self._start_ns[session]
        if self._timed is None:
            self._timed = row.has("timestamp")
        if self._timed:
            arrival_ns = row.time_ns("timestamp", unit=self.unit)
        elif row.has("timestamp"):
            raise Damage(*row.get("timestamp"), "left out: the rows before have no timestamp")
        else:
            arrival_ns, self.arrivals = 0, "none"
        if session is not None:
            self._start_ns.setdefault(session, arrival_ns)
        return arrival_ns


def check_ids(ids: list[int], prompt_tokens: int, block: int, *, partial_has_id: bool | None = True) -> None:
    """One id for each block that a prompt begins. Raises Damage.

    `partial_has_id`: whether the last block has an id where the prompt fills it in part only; None: either way.
    """
    begun, filled = math.ceil(prompt_tokens / block), prompt_tokens // block
    if len(ids) == begun or (partial_has_id is None and len(ids) == filled):
        return
    likely = [b for b in (16, 32, 64, 128, 256, 512, 1024) if math.ceil(prompt_tokens / b) == len(ids)]
    hint = f"; {' or '.join(map(str, likely))} tokens per id would fit: --hash-block-size" if likely else ""
    raise Damage("hash_ids", f"{len(ids)} ids", f"{begun} for {prompt_tokens} tokens at {block} per id{hint}")


def _matches(head: Head) -> bool:
    if not head.keys >= KEYS or not OTHERS.isdisjoint(head.keys):
        return False
    return not TIMES.isdisjoint(head.keys) or head.keys <= UNTIMED


FORMAT = TraceFormat(
    name="mooncake",
    looks_like="JSON lines with timestamp, input_length, output_length, hash_ids",
    matches=_matches,
    read=_read,
    uses=frozenset({"time_unit", "block_size"}),
)
DELTA_FORMAT = TraceFormat(
    name="mooncake delta",
    looks_like="as mooncake; rows of later turns hold what is new (only by name)",
    matches=lambda head: False,
    read=_read_deltas,
    uses=frozenset({"time_unit", "block_size"}),
)
