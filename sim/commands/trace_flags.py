"""Flags that say how a trace is read, and those that the `trace` commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import count, flag, switch

TRACE = Group("Trace", sort_key=1)
WRITING = Group("Output", sort_key=0)
TRACE_HELP = "A trace file or folder; its format is told by its content, gzip and zstandard are unpacked."
HASH_BLOCK_SIZE = "Tokens that one prefix id (hash id) stands for."
TracePath = Annotated[Path, Parameter(help=TRACE_HELP)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """How a trace is read, where its content leaves that open."""

    trace_format: Annotated[
        str | None,
        flag(TRACE, "Name of the format (default: told by the content).", "--trace-format", "--format"),
    ] = None
    time_unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None, flag(TRACE, "Unit of the times in the file.")
    ] = None
    hash_block_size: Annotated[int | None, count(TRACE, HASH_BLOCK_SIZE)] = None
    columns: Annotated[
        tuple[str, ...],
        switch(
            TRACE,
            "field=name, several times: where csv or JSONL of your own has arrival, prompt_tokens, output_tokens, "
            "session_id ...",
        ),
    ] = ()
    tokenizer: Annotated[
        Path | None,
        flag(TRACE, "tokenizer.json, or a folder that has one: for traces that hold texts."),
    ] = None
    trace_model: Annotated[
        str | None, flag(TRACE, "Only the rows of this model, for traces that name one.")
    ] = None
    trace_output_tokens: Annotated[
        int | None,
        count(
            TRACE,
            "Output tokens of requests that do not say (aibrix, openai batch), or in the place of every answer "
            "(sharegpt, sharegpt sessions). No other format takes it.",
        ),
    ] = None
    window: Annotated[
        str | None,
        flag(
            TRACE, "START:END in seconds of the source's own clock, for ServeGen folders (default: an hour)."
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReadFlags(TraceFlags):
    """The same, and what happens to rows that cannot be used."""

    hash_block_size: Annotated[
        int | None, count(TRACE, HASH_BLOCK_SIZE, "--hash-block-size", "--block-size")
    ] = None
    strict: Annotated[bool, switch(TRACE, "Refuse the trace for the first row that would be dropped.")] = (
        False
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OpenFlags(ReadFlags):
    """How a trace is read to make another of it, and what is drawn at random for that."""

    jitter_ticks: Annotated[
        bool,
        switch(
            TRACE,
            "Spread arrivals of a coarse clock, drawn uniformly within their tick; requests keep their order.",
        ),
    ] = False
    seed: Annotated[
        int, count(TRACE, "Root of what is drawn: spread ticks, generated traces, resampling.")
    ] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WriteFlags:
    """Where the result goes."""

    out: Annotated[
        Path, flag(WRITING, "File to write: .jsonl, .jsonl.zst, .jsonl.gz or .parquet.", "--out", "-o")
    ]
    overwrite: Annotated[bool, switch(WRITING, "Replace the file of --out.")] = False
    json: Annotated[bool, switch(WRITING, "Print the result as one JSON object.")] = False


READ, OPEN = ReadFlags(), OpenFlags()
