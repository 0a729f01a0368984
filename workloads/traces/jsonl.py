"""Our own trace format, one JSON object a line: every field of a RequestSpec but its source row.

Written and read back without loss. Times stand as written: the file has its own time 0. A trace that has no times of
arrival has none in the file: no row has `arrival_s`, or, where only first turns have times, no later turn of a session
that stands at its start. Fields that hold
their default may be left out, or null; unknown fields are refused, since they would be ignored silently, and so
are fields given twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from servetwin.workloads.checks import is_int
from servetwin.workloads.spec import RequestSpec
from servetwin.workloads.traces.json_rows import numbered_lines, parse_object
from servetwin.workloads.traces.trace import ArrivalTimes, Reading, TraceFormat
from servetwin.workloads.traces.values import Damage
from servetwin.workloads.traces.writing import write_json_lines


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a field may hold, and how it becomes the value of a RequestSpec."""

    allowed: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any]


def _is_number(value: object) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_int_list(value: object) -> bool:
    # By the set of types: prompts may hold 100,000 ids each.
    return isinstance(value, list) and set(map(type, value)) <= {int}


_NAME = _Kind("a text, not empty", lambda v: (isinstance(v, str) and v != "") or is_int(v), str)
_SECONDS = _Kind("a finite number of seconds, 0 or more", lambda v: _is_number(v) and v >= 0, float)
_COUNT = _Kind("a whole number, 1 or more", lambda v: is_int(v) and v >= 1, int)
_INDEX = _Kind("a whole number, 0 or more", lambda v: is_int(v) and v >= 0, int)
_INT = _Kind("a whole number", is_int, int)
_SWITCH = _Kind("true or false", lambda v: isinstance(v, bool), bool)
_TOKEN_IDS = _Kind(
    "a list of whole numbers, 0 or more", lambda v: _is_int_list(v) and min(v, default=0) >= 0, tuple
)
_IDS = _Kind("a list of whole numbers", _is_int_list, tuple)

FIELDS: dict[str, _Kind] = {
    "request_id": _NAME,
    "arrival_s": _SECONDS,
    "prompt_tokens": _COUNT,
    "prompt_token_ids": _TOKEN_IDS,
    "output_tokens": _COUNT,
    "priority": _INT,
    "session_id": _NAME,
    "turn": _INDEX,
    "think_time_s": _SECONDS,
    "context_tokens": _INDEX,
    "prefix_ids": _IDS,
    "prefix_block_tokens": _COUNT,
    "output_token_ids": _TOKEN_IDS,
    "min_tokens": _INDEX,
    "stop_token_ids": _TOKEN_IDS,
    "ignore_eos": _SWITCH,
    "abort_s": _SECONDS,
    "client_id": _NAME,
    "cache_salt": _NAME,
    "predicted_output_tokens": _COUNT,
}
ADAPTER_FIELDS = frozenset({"adapter", "adapter_id", "lora", "lora_name", "lora_request"})
"""Names under which other tools ask for an adapter."""
REQUIRED = ("request_id", "arrival_s", "output_tokens")
_VALUES = attrgetter(*FIELDS)
_DEFAULTS = {f.name: f.default for f in fields(RequestSpec) if f.name != "priority"}
_LEFT_OUT = tuple(_DEFAULTS.get(name, MISSING) for name in FIELDS)
"""What is not written, of each of FIELDS."""


def to_jsonl(spec: RequestSpec) -> dict[str, Any]:
    """One request as plain JSON values; fields that hold their default are left out, `priority` never is."""
    row: dict[str, Any] = {}
    for name, value, default in zip(FIELDS, _VALUES(spec), _LEFT_OUT, strict=True):
        # Nearly all of them hold it.
        if value is not default and value != default:
            row[name] = list(value) if isinstance(value, tuple) else value
    if spec.prompt_token_ids is not None:
        row.pop("prompt_tokens", None)
    return row


def write_jsonl(path: str | Path, specs: Iterable[RequestSpec]) -> None:
    """Writes requests in the order given, compressed where the name ends in .gz or .zst.

    The file appears under its name only when it is complete.
    """
    write_json_lines(Path(path), map(to_jsonl, specs))


def jsonl_rows(specs: Iterable[RequestSpec], arrivals: ArrivalTimes) -> Iterator[dict[str, Any]]:
    """The rows of requests in order of arrival; where `arrivals` says that a time is none, it is left out."""
    start_s: dict[str, float] = {}
    for spec in specs:
        row = to_jsonl(spec)
        waits = spec.session_id is not None and start_s.get(spec.session_id) == spec.arrival_s
        if arrivals == "none" or (arrivals == "first turns" and waits):
            del row["arrival_s"]
        if spec.session_id is not None:
            start_s.setdefault(spec.session_id, spec.arrival_s)
        yield row


def _read(reading: Reading) -> None:
    first_row_of: dict[str, int] = {}
    times = _Times()
    for number, line in numbered_lines(reading.source):
        with reading.rows.row(number):
            row = parse_object(line)
            spec = request_of(number, times.completed(row))
            _check_given_once(line, row)
            before = first_row_of.setdefault(spec.request_id, number)
            if before != number:
                raise Damage("request_id", spec.request_id, f"unique; row {before} has it too")
            reading.rows.add_request(spec)
            times.emitted(spec, timed=row.get("arrival_s") is not None)
    reading.arrivals = times.arrivals


class _Times:
    """Which requests of a file have times of their own."""

    def __init__(self) -> None:
        self._timed: bool | None = None
        """Whether the first request has; None: there was none."""
        self._waiting = False
        """Whether a later turn has not."""
        self._start_s: dict[str, float] = {}

    def completed(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with its arrival, which may be left out in all rows or in later turns. Raises Damage."""
        arrival_s, session = row.get("arrival_s"), row.get("session_id")
        if arrival_s is None and not self._timed:
            return row | {"arrival_s": 0.0}
        if arrival_s is None and str(session) in self._start_s:
            return row | {"arrival_s": self._start_s[str(session)]}
        if arrival_s is not None and self._timed is False:
            raise Damage("arrival_s", arrival_s, "left out, as in the rows before")
        return row

    def emitted(self, spec: RequestSpec, *, timed: bool) -> None:
        """This request was not dropped; `timed`: its row says when it is sent."""
        if self._timed is None:
            self._timed = timed
        self._waiting |= self._timed and not timed
        if spec.session_id is not None:
            self._start_s.setdefault(spec.session_id, spec.arrival_s)

    @property
    def arrivals(self) -> ArrivalTimes:
        if self._timed is False:
            return "none"
        return "first turns" if self._waiting else "recorded"


def request_of(number: int, row: dict[str, Any]) -> RequestSpec:
    """The request that row `number` describes by the names of its fields. Raises Damage or WorkloadError."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        kind = FIELDS.get(name)
        if name in ADAPTER_FIELDS:
            raise Damage(name, value, "left out: adapters are not modelled")
        if kind is None:
            raise Damage("field", name, f"one of {', '.join(FIELDS)}")
        if value is None:
            continue
        if not kind.accepts(value):
            raise Damage(name, value, kind.allowed)
        values[name] = kind.convert(value)
    for name in REQUIRED:
        if name not in values:
            raise Damage(name, None, f"given: {FIELDS[name].allowed}")
    _check_tokens(values)
    return RequestSpec(**values, source_row=number)


def _check_given_once(line: str, row: dict[str, Any]) -> None:
    """Refuses a field given twice, of which orjson keeps the last. `row` has been checked: it nests nothing."""
    # A field needs a colon of its own, so as many colons as fields leave none for a second one.
    if line.count(":") == len(row):
        return
    pairs: list[tuple[str, Any]] = json.loads(line, object_pairs_hook=list)
    seen: set[str] = set()
    for name, value in pairs:
        if name in seen:
            raise Damage(name, value, "given once; the row has it twice")
        seen.add(name)


def _check_tokens(values: dict[str, Any]) -> None:
    if "prompt_token_ids" in values:
        values.setdefault("prompt_tokens", len(values["prompt_token_ids"]))
    if "prompt_tokens" not in values:
        raise Damage("prompt_tokens", None, "given, or prompt_token_ids in its place")


FORMAT = TraceFormat(
    name="servetwin jsonl",
    looks_like="JSON lines with request_id, arrival_s, prompt_tokens or prompt_token_ids, output_tokens",
    matches=lambda head: (
        head.first_line.startswith("{")
        and not head.keys.isdisjoint({"arrival_s", "output_tokens"})
        # TraceLab's rounds have output_tokens, too.
        and "timing_events" not in head.keys
    ),
    read=_read,
)
