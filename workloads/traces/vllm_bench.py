"""Results of `vllm bench serve --save-detailed`: JSON with input_lens, output_lens, start_times, errors.

One result, one a line (`--append-result`), or pretty printed ones below one another. A row is a request; failed ones
(with an error, or without output) are dropped. `start_times` are seconds of a monotonic clock; older versions write
none, and then there are no arrival times. Appended results are one workload only where they were measured one after
another by one clock. Source: vllm/benchmarks/serve.py of vLLM 0.22.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from servetwin.workloads.checks import is_int
from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.json_stream import JsonStream
from servetwin.workloads.traces.nested import NO_REQUESTS, NestedRows
from servetwin.workloads.traces.source import Head
from servetwin.workloads.traces.trace import Reading, TraceFormat
from servetwin.workloads.traces.values import Damage, Fields, Useless, shown

LENGTHS = frozenset({"input_lens", "output_lens"})
SUMMARY = frozenset({"completed", "duration"})
RUN_KEYS = frozenset(
    {"num_prompts", "total_input_tokens", "backend", "endpoint_type", "model_id", "request_rate"}
)
ARRAYS = ("input_lens", "output_lens", "start_times", "errors")
READ = frozenset({*ARRAYS, "request_rate", "max_concurrency", "backend", "endpoint_type"})
"""What else a result holds, such as the latencies of all tokens, may be a hundred times as long and is not kept."""
FAILED = "failed request"
CLIENT_COUNTS = (
    "input_lens are the client's counts of chat messages: what a chat template added is not in them"
)


@dataclass(frozen=True, slots=True)
class _Result:
    """What one benchmark says of its requests."""

    number: int
    arrays: dict[str, list[Any]]
    """Those of ARRAYS that it has and that are not empty."""
    request_rate: Any
    max_concurrency: Any
    is_chat: bool
    """Whether the server made the prompts of messages."""

    @property
    def requests(self) -> int:
        return max((len(a) for a in self.arrays.values()), default=0)

    def request(self, place: int) -> Fields:
        """One request. Raises Damage where a list ends before it."""
        for name, values in self.arrays.items():
            if place >= len(values):
                raise Damage(name, f"{len(values)} values", f"one for each of the {self.requests} requests")
        return Fields({name: values[place] for name, values in self.arrays.items()})

    def times_s(self) -> tuple[float, float]:
        """The first and the last time that is a number; an empty range where there is none."""
        times = [
            t for t in self.arrays["start_times"] if is_int(t) or (isinstance(t, float) and math.isfinite(t))
        ]
        return min(times, default=math.inf), max(times, default=-math.inf)


def _read(reading: Reading) -> None:
    rows = NestedRows(reading.rows, "result")
    results = list(_results(reading, rows))
    timed = all("start_times" in result.arrays for result in results)
    if timed:
        _check_one_clock(reading, results)
    elif results:
        reading.arrivals = "none"
        rates = _each_value(r.request_rate for r in results)
        reading.notes.append(f"start_times are missing; the benchmark's request_rate was {rates}")
    if timed:
        reading.notes += _paced(results)
    if any(result.is_chat for result in results):
        reading.notes.append(CLIENT_COUNTS)
    for result in results:
        if not result.requests:
            rows.skip(result.number, NO_REQUESTS)
        for place in range(result.requests):
            with rows.row(result.number) as row:
                _add(reading, row, result.request(place), timed)
    reading.about["results"] = len(results)


def _paced(results: list[_Result]) -> Iterator[str]:
    """What gave the start_times their pace beside the users whose traffic they stand for."""
    limits = [r.max_concurrency for r in results if r.max_concurrency is not None]
    if limits:
        yield (
            f"measured with max_concurrency {_each_value(limits)}: the client held requests back until others had "
            f"ended, so start_times carry the pace of the engine that was measured"
        )
    rates = [r.request_rate for r in results if r.request_rate not in (None, "inf", math.inf)]
    if rates:
        yield f"measured with request_rate {_each_value(rates)}: start_times are those of the client's own process"


def _each_value(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(shown, values)))


def _add(reading: Reading, row: int, request: Fields, timed: bool) -> None:
    output = request.count("output_lens")
    if output == 0 or request.row.get("errors"):
        raise Useless(FAILED)
    reading.rows.add(
        row,
        arrival_ns=request.time_ns("start_times", unit="s") if timed else 0,
        prompt_tokens=request.count("input_lens"),
        output_tokens=output,
    )


def _results(reading: Reading, rows: NestedRows) -> Iterator[_Result]:
    """Raises WorkloadError where none has the lists of `--save-detailed`."""
    found: list[_Result] = []
    undetailed = 0

    def read(number: int, row: Fields) -> None:
        nonlocal undetailed
        if not row.row.keys() >= LENGTHS:
            undetailed += 1
            missing = min(LENGTHS - row.row.keys())
            raise Damage(missing, None, "there: vllm bench serve writes it with --save-detailed")
        arrays = {name: _array(row, name) for name in ARRAYS}
        kept = {name: values for name, values in arrays.items() if values or name in LENGTHS}
        is_chat = any("chat" in shown(row.row.get(name)) for name in ("backend", "endpoint_type"))
        found.append(
            _Result(number, kept, row.row.get("request_rate"), row.row.get("max_concurrency"), is_chat)
        )

    _each_result(JsonStream(reading.source, objects_begin_lines=True), rows, read)
    if undetailed and not found:
        raise WorkloadError(
            f"{reading.source.path}: has the totals of a benchmark, but not the lengths of its requests: "
            f"vllm bench serve writes them with --save-detailed"
        )
    return iter(found)


def _each_result(stream: JsonStream, rows: NestedRows, read: Callable[[int, Fields], None]) -> None:
    for number in count(1):
        if not stream.peek():
            return
        try:
            read(number, _fields(stream))
        except Damage as e:
            rows.damaged(number, e)
            stream.to_next_object()


def _fields(stream: JsonStream) -> Fields:
    found: dict[str, Any] = {}
    for name in stream.members():
        if name not in READ:
            stream.skip()
        elif stream.peek() == "[":
            found[name] = list(stream.elements())
        else:
            found[name] = stream.value()
    return Fields(found)


def _array(row: Fields, name: str) -> list[Any]:
    value = row.row.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise Damage(name, value, "a list")
    return value


def _check_one_clock(reading: Reading, results: list[_Result]) -> None:
    for one, other in pairwise(results):
        (begin, end), (next_begin, next_end) = one.times_s(), other.times_s()
        if next_begin < end:
            raise WorkloadError(
                f"{reading.source.path}: start_times of result {one.number} are from {begin:,.9g} to {end:,.9g} s, "
                f"those of result {other.number} from {next_begin:,.9g} to {next_end:,.9g} s: "
                f"not one after the other by one clock, so they must be in files of their own"
            )


def _matches(head: Head) -> bool:
    if not head.text.startswith("{"):
        return False
    return head.keys >= LENGTHS or (head.keys >= SUMMARY and not head.keys.isdisjoint(RUN_KEYS))


FORMAT = TraceFormat(
    name="vllm bench",
    looks_like="JSON of vllm bench serve --save-detailed with input_lens, output_lens, start_times",
    matches=_matches,
    read=_read,
)
