"""What the commands that make traces of traces do: read, change, write, say what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.loading import read_options
from servetwin.sim.commands.show import print_json, say
from servetwin.sim.commands.trace_flags import OpenFlags, ReadFlags, WriteFlags
from servetwin.workloads import ReadOptions, RequestColumns, Tolerance, Trace, read_trace
from servetwin.workloads.export import Wrote, write_trace
from servetwin.workloads.traces.trace import ArrivalTimes
from servetwin.workloads.transform import span_of, ticks_spread

LONG = 100_000
"""Requests from which on progress is shown."""
NO_TIMES = "{path}: has no arrival times: all its requests stand at 0 s"
FIRST_TURNS = (
    "{path}: only first turns have times: later ones stand at the start of their session; run it in a closed loop "
    "(--loop closed, the default where think times are known)"
)


@dataclass
class Making:
    """One result in the making: the requests, where they came from, what must be said of them."""

    requests: RequestColumns
    traces: list[Trace]
    notes: list[str] = field(default_factory=list)
    arrivals: ArrivalTimes = "recorded"
    """Which of the requests have times of their own."""
    result: dict[str, Any] = field(default_factory=dict)
    """What the command adds to its JSON."""

    def note(self, text: str) -> None:
        """Something the user must know: on stderr, and in the JSON."""
        self.notes.append(text)

    def require_times(self, what: str) -> None:
        """Raises UsageError for a trace that has none."""
        for trace in self.traces:
            if trace.arrivals == "none":
                raise UsageError(f"{trace.path}: has no arrival times, so there is nothing to {what}")


def options_of(flags: ReadFlags, tolerance: Tolerance, seed: int = 0) -> ReadOptions:
    """How to read a trace: `tolerance`, unless --strict."""
    return read_options(flags, Tolerance.STRICT if flags.strict else tolerance, seed)


def opened(path: Path, flags: OpenFlags, options: ReadOptions | None = None) -> Making:
    """The requests of a trace, spread over their ticks where that is asked for.

    Damaged rows are refused, rows without use (zero lengths, failed requests) are counted. `options`: how to read
    this one, where the flags do not say it all.
    """
    trace = read_trace(path, options or options_of(flags, Tolerance.NORMAL, flags.seed))
    making = Making(trace.requests, [trace], arrivals=trace.arrivals)
    for note in trace.notes:
        making.note(f"{path}: {note}")
    if trace.rows_dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in trace.rows_dropped.items())
        making.note(
            f"{path}: {trace.rows_read - len(trace):,} of {trace.rows_read:,} rows dropped: {reasons}"
        )
    if trace.arrivals != "recorded":
        making.note((NO_TIMES if trace.arrivals == "none" else FIRST_TURNS).format(path=path))
    if flags.jitter_ticks:
        making.require_times("spread")
        making.requests = ticks_spread(trace.requests, seed=flags.seed)
        making.note(f"{path}: arrivals are drawn uniformly within their ticks (seed {flags.seed})")
    return making


def finish(making: Making, flags: WriteFlags) -> int:
    """Writes our own format and says what was written."""
    with progress(len(making.requests)) as wrote:
        write_trace(
            flags.out, making.requests, arrivals=making.arrivals, overwrite=flags.overwrite, wrote=wrote
        )
    return tell(making, flags)


def tell(making: Making, flags: WriteFlags) -> int:
    """Notes on stderr, the result on stdout."""
    for note in making.notes:
        say(note)
    span_s, count = span_of(making.requests), len(making.requests)
    rate = count / span_s if span_s > 0 else None
    if flags.json:
        print_json(
            {
                "path": str(flags.out),
                "requests": count,
                "span_s": span_s,
                "rate_per_s": rate,
                "sources": [{"path": t.path, "format": t.format, **t.counts()} for t in making.traces],
                **making.result,
                "notes": making.notes,
            }
        )
    else:
        shown = "" if rate is None else f" ({rate:,.4g} requests/s)"
        line = f"{flags.out}: {count:,} requests over {span_s:,.6g} s{shown}"
        Console().print(line, soft_wrap=True, markup=False, highlight=False)
    return 0


@contextmanager
def progress(total: int) -> Iterator[Wrote]:
    """A bar of written requests on stderr, where there are many."""
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=total < LONG)
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
