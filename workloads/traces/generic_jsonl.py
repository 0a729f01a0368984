"""JSON lines of no known format, read by a map from our fields to theirs (`ReadOptions.columns`).

A field that is not in the map has our own name. A dot leads into an object: `prompt_tokens` from `usage.prompt`. Two
lengths are wanted, or token ids in the place of one; everything else may be missing. Times in a field of our own name
are in seconds, as the name says; those in a field of another name have the unit of `time_unit`, or are dates. Where the
first row has no arrival, all requests stand at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from servetwin.workloads.checks import is_int
from servetwin.workloads.columns import ROW_ID
from servetwin.workloads.spec import MAX_PRIORITY, RequestSpec, WorkloadError
from servetwin.workloads.traces.csv_rows import DATE
from servetwin.workloads.traces.json_rows import each_object
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields, count, ids, text, time_ns, token_ids

Value = Callable[[str, object], Any]


def _priority(name: str, value: object) -> int:
    if not isinstance(value, int) or not is_int(value) or abs(value) > MAX_PRIORITY:
        raise Damage(name, value, f"a whole number between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    return value


ARRIVAL, THINK = "arrival_s", "think_time_s"
TIMES = (ARRIVAL, THINK)
VALUES: Mapping[str, Value] = {
    "request_id": text,
    "prompt_tokens": count,
    "output_tokens": count,
    "prompt_token_ids": token_ids,
    "output_token_ids": token_ids,
    "priority": _priority,
    "session_id": text,
    "turn": count,
    "context_tokens": count,
    "prefix_ids": ids,
    "client_id": text,
    "cache_salt": text,
}
"""Our fields, but for the times, and how their values are read."""
LENGTH_OF = {"prompt_token_ids": "prompt_tokens", "output_token_ids": "output_tokens"}


def _read(reading: Reading) -> None:
    row_of = _Map(reading)
    first_row_of: dict[str, int] = {}
    timed: bool | None = None

    def read(number: int, row: Fields) -> None:
        nonlocal timed
        values = row_of.values(row)
        arrival_ns = row_of.time_ns(ARRIVAL, row)
        if timed is None:
            timed = arrival_ns is not None
        if timed is not (arrival_ns is not None):
            allowed = "given, as in the rows before" if timed else "left out, as in the rows before"
            raise Damage(row_of.name(ARRIVAL), row_of.raw(ARRIVAL, row), allowed)
        identity = values.setdefault("request_id", ROW_ID.format(number))
        if first_row_of.setdefault(identity, number) != number:
            raise Damage(
                row_of.name("request_id"), identity, f"unique; row {first_row_of[identity]} has it too"
            )
        if values["prompt_tokens"] and values["output_tokens"]:
            RequestSpec(arrival_s=0.0, **values)
        reading.rows.add(number, arrival_ns=arrival_ns or 0, **values)

    each_object(reading.source, reading.rows, read)
    if timed is False:
        reading.arrivals = "none"


class _Map:
    """Finds our fields in the rows of a file. Raises WorkloadError for a map that cannot be meant."""

    def __init__(self, reading: Reading) -> None:
        self._options = reading.options
        self._path = reading.source.path
        for field in reading.options.columns:
            if field not in (*TIMES, *VALUES):
                known = ", ".join((*TIMES, *VALUES))
                raise WorkloadError(f"{self._path}: column for {field!r}: must be for one of {known}")
        if "prefix_ids" in reading.options.columns and reading.options.block_size is None:
            raise WorkloadError(
                f"{self._path}: column for prefix_ids: say how many tokens one has: --hash-block-size"
            )

    def name(self, field: str) -> str:
        """What a field is called in the file."""
        return self._options.columns.get(field, field)

    def raw(self, field: str, row: Fields) -> Any:
        """Its value; None where it has none."""
        return _at(row.row, self.name(field))

    def time_ns(self, field: str, row: Fields) -> int | None:
        """Raises Damage, and WorkloadError where the unit is not known."""
        name, value = self.name(field), self.raw(field, row)
        if value is None:
            return None
        if isinstance(value, str) and field == ARRIVAL:
            ns: int = DATE.one(name, value)
            return ns
        unit = "s" if name == field else self._options.time_unit
        if unit is None:
            raise Damage(name, value, "in a unit that is known: say it with --time-unit")
        return time_ns(name, value, unit)

    def values(self, row: Fields) -> dict[str, Any]:
        """All fields but the arrival, as columns. Raises Damage."""
        found: dict[str, Any] = {}
        for field, convert in VALUES.items():
            value = self.raw(field, row)
            if value is not None:
                found[field] = convert(self.name(field), value)
        for field, length in LENGTH_OF.items():
            if field in found:
                found.setdefault(length, len(found[field]))
            if length not in found:
                raise Damage(self.name(length), None, "given: a whole number of tokens")
        think_ns = self.time_ns(THINK, row)
        if think_ns is not None:
            found[THINK] = think_ns / 1e9
        if "prefix_ids" in found:
            found["prefix_block_tokens"] = self._options.block_size
        return found


def _at(row: dict[str, Any], name: str) -> Any:
    """The value under a name; where there is none of it, a dot leads into an object."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


FORMAT = TraceFormat(
    name="jsonl",
    looks_like="any JSON lines, with fields mapped onto ours; only where it is asked for",
    matches=lambda head: False,
    read=_read,
    uses=frozenset({"time_unit", "block_size", "columns"}),
)
