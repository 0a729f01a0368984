"""The formats that can be read. A new one is a module with a TraceFormat, and its place in this list."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from servetwin.workloads.columns import RequestColumns
from servetwin.workloads.spec import ArgumentError, WorkloadError
from servetwin.workloads.traces import (
    aibrix,
    azure,
    bailian,
    burstgpt,
    generic_csv,
    generic_jsonl,
    jsonl,
    llmservingsim,
    lmcache,
    mooncake,
    openai_batch,
    parquet,
    run_folder,
    servegen,
    sharegpt,
    splitwise,
    tracelab_csv,
    tracelab_jsonl,
    vidur,
    vllm_bench,
    weka,
)
from servetwin.workloads.traces.doubts import doubts
from servetwin.workloads.traces.options import ReadOptions
from servetwin.workloads.traces.rows import Rows
from servetwin.workloads.traces.source import Source, naming
from servetwin.workloads.traces.trace import Reading, Trace, TraceFormat

FORMATS: tuple[TraceFormat, ...] = (
    azure.FORMAT,
    mooncake.FORMAT,
    mooncake.DELTA_FORMAT,
    jsonl.FORMAT,
    vidur.FORMAT,
    burstgpt.FORMAT,
    splitwise.FORMAT,
    tracelab_csv.FORMAT,
    servegen.FORMAT,
    generic_csv.FORMAT,
    bailian.FORMAT,
    weka.FORMAT,
    vllm_bench.FORMAT,
    llmservingsim.FORMAT,
    lmcache.FORMAT,
    aibrix.FORMAT,
    tracelab_jsonl.FORMAT,
    sharegpt.FORMAT,
    sharegpt.SESSIONS_FORMAT,
    openai_batch.FORMAT,
    generic_jsonl.FORMAT,
    run_folder.FORMAT,
    parquet.FORMAT,
)
LOWEST_PLAUSIBLE_RATE, HIGHEST_PLAUSIBLE_RATE = 1 / 300, 1000.0
"""Requests/s of a trace whose unit is not doubted."""
FEW_REQUESTS = 50
"""Fewer say nothing about a rate."""
FLAGS = {
    "time_unit": "--time-unit",
    "block_size": "--hash-block-size",
    "columns": "--columns",
    "tokenize": "--tokenizer",
    "output_tokens": "--trace-output-tokens",
    "model": "--trace-model",
    "window_s": "--window",
}
"""Names of the options on a command line."""
MODEL_FORMAT: Literal["servetwin workload model"] = "servetwin workload model"
"""What the file of a fitted model says under `format`; it is no trace."""
_ALWAYS_USED = frozenset({"format", "tolerance", "seed"})
"""The seed is that of a whole run, which has other uses for it."""


def read_trace(path: str | Path, options: ReadOptions | None = None) -> Trace:
    """All requests of a trace file or folder; its format is told by the content, gzip and zstandard are unpacked.

    Foreign traces: times minus the earliest arrival, sorted stably. Our JSONL: times as written. A damaged
    row, a file without usable rows, or one of no known format raises WorkloadError (see `Tolerance`).
    """
    options = options or ReadOptions()
    source = Source(path)
    with naming(source.path):
        return _read(source, options)


def _read(source: Source, options: ReadOptions) -> Trace:
    format_ = _format_of(source, options)
    _check_options(source, format_, options)
    reading = Reading(source, options, Rows(source.path, options.tolerance))
    format_.read(reading)
    rows = reading.rows
    requests = reading.afterwards(rows.requests())
    if reading.arrivals == "recorded":
        _check_rate(reading, requests)
    else:
        requests = with_waiting_turns(requests)
    return Trace(
        requests=requests,
        format=format_.name,
        path=source.path,
        rows_read=rows.read,
        rows_dropped=dict(rows.dropped),
        offences=tuple(rows.offences),
        unwanted=frozenset(reading.rows.unwanted),
        arrivals=reading.arrivals,
        about=reading.about,
        notes=(*reading.notes, *doubts(requests)),
    )


def known_formats() -> str:
    """The names of the formats, for messages."""
    return ", ".join(f.name for f in FORMATS)


def _format_of(source: Source, options: ReadOptions) -> TraceFormat:
    if options.format is not None:
        return named_format(options.format)
    if re.match(rf'\{{[^{{]*"format"\s*:\s*"{MODEL_FORMAT}"', source.head.text):
        raise WorkloadError(
            f"{source.path}: is a fitted model, no trace: `servetwin trace synth` makes a trace of it"
        )
    found = [f for f in FORMATS if f.matches(source.head)]
    if not found and options.columns:
        # Whoever maps columns has said that it is none of the others.
        return generic_jsonl.FORMAT if source.head.first_line.startswith("{") else generic_csv.FORMAT
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f.name for f in found)
        raise WorkloadError(f"{source.path}: may be {names}: say which with --trace-format")
    begins = (
        "is a folder of" if source.head.folder else f"begins with {source.head.first_line[:60]!r}, which is"
    )
    hint = (
        "give one of its files, or the folder of a run or of ServeGen's clients"
        if source.head.folder
        else "for csv and JSONL of your own map the columns, for example --columns prompt_tokens=in"
    )
    raise WorkloadError(f"{source.path}: {begins} no known format ({known_formats()}); {hint}")


def named_format(name: str) -> TraceFormat:
    """The format of this name. Raises ArgumentError where there is none."""
    for format_ in FORMATS:
        if format_.name == name:
            return format_
    raise ArgumentError("format", f"{name!r}: must be one of {known_formats()}")


def _check_options(source: Source, format_: TraceFormat, options: ReadOptions) -> None:
    """An option that the format has no use for would be ignored silently."""
    for name in _useless(format_, options):
        raise WorkloadError(
            f"{source.path}: {name} ({FLAGS.get(name, name)}) has no use for the format {format_.name}"
        )


def _useless(format_: TraceFormat, options: ReadOptions) -> list[str]:
    given = (f.name for f in fields(options) if getattr(options, f.name) != getattr(_DEFAULTS, f.name))
    return [name for name in given if name not in _ALWAYS_USED | format_.uses]


def usable_options(path: str | Path, options: ReadOptions) -> tuple[ReadOptions, list[str]]:
    """`options` without those that the format of this file has no use for, and the names of these.

    For options that are given for several files at once.
    """
    left_out = _useless(_format_of(Source(path), options), options)
    return replace(options, **{name: getattr(_DEFAULTS, name) for name in left_out}), left_out


_DEFAULTS = ReadOptions()


def _check_rate(reading: Reading, requests: RequestColumns) -> None:
    """A unit that is only the custom of a format is doubted where it gives a rate that no service has."""
    if reading.options.time_unit is not None or "time_unit" not in reading.about:
        return
    unit, times_s = reading.about["time_unit"], requests.arrival_s
    span_s = float(times_s[-1] - times_s[0])
    # All at one time is so in every unit.
    if span_s == 0 or len(requests) < FEW_REQUESTS:
        return
    if not LOWEST_PLAUSIBLE_RATE <= len(requests) / span_s <= HIGHEST_PLAUSIBLE_RATE:
        raise WorkloadError(
            f"{reading.source.path}: {len(requests):,} requests over {span_s:,.6g} s, if its times are in {unit}: "
            f"say which unit they have with --time-unit"
        )


def with_waiting_turns(requests: RequestColumns) -> RequestColumns:
    """The same, where later turns without times wait for their answers: an unknown pause is none.

    Without it they would be sent together with the beginning of their session.
    """
    if not requests.has("session_id"):
        return requests
    sessions, turns = requests.values("session_id"), requests.values("turn")
    first: dict[str, tuple[int, int]] = {}
    for place, (session, turn) in enumerate(zip(sessions, turns, strict=True)):
        if session is not None:
            first[session] = min(first.get(session, (turn or 0, place)), (turn or 0, place))
    pauses_s = [
        0.0 if pause_s is None and session is not None and first[session][1] != place else pause_s
        for place, (session, pause_s) in enumerate(
            zip(sessions, requests.values("think_time_s"), strict=True)
        )
    ]
    return requests.with_column("think_time_s", pauses_s)
