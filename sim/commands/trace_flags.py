"""Flags that the `trace` commands share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import TRACE as TRACE_GROUP
from servetwin.sim.commands.flags import TraceFlags, whole_number

TRACE = TraceFlags()
WRITING = Group("Output", sort_key=0)
TRACE_HELP = "A trace file or folder; its format is told by its content, gzip and zstandard are unpacked."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReadFlags:
    """How a trace is read, and what happens to rows that cannot be used."""

    trace: TraceFlags = TRACE
    block_size: Annotated[
        int | None,
        Parameter(group=TRACE_GROUP, converter=whole_number, help="The same as --hash-block-size."),
    ] = None
    strict: Annotated[
        bool,
        Parameter(
            group=TRACE_GROUP, negative=(), help="Refuse the trace for the first row that would be dropped."
        ),
    ] = False

    def trace_flags(self) -> TraceFlags:
        """With the one size of blocks that was given. Raises UsageError for two."""
        if self.block_size is None:
            return self.trace
        if self.trace.hash_block_size is not None:
            raise UsageError("--block-size and --hash-block-size say the same: give one of them")
        return replace(self.trace, hash_block_size=self.block_size)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DrawFlags:
    """What is drawn at random while a trace is read."""

    jitter_ticks: Annotated[
        bool,
        Parameter(
            group=TRACE_GROUP,
            negative=(),
            help="Spread arrivals of a coarse clock, drawn uniformly within their tick; requests keep their order.",
        ),
    ] = False
    seed: Annotated[
        int,
        Parameter(
            group=TRACE_GROUP, help="Root of what is drawn: spread ticks, generated traces, resampling."
        ),
    ] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WriteFlags:
    """Where the result goes."""

    out: Annotated[
        Path,
        Parameter(
            ("--out", "-o"), group=WRITING, help="File to write: .jsonl, .jsonl.zst, .jsonl.gz or .parquet."
        ),
    ]
    overwrite: Annotated[bool, Parameter(group=WRITING, negative=(), help="Replace the file of --out.")] = (
        False
    )
    json: Annotated[
        bool, Parameter(group=WRITING, negative=(), help="Print the result as one JSON object.")
    ] = False


READ = ReadFlags()
DRAW = DrawFlags()
