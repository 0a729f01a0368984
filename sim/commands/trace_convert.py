"""`servetwin trace convert`: a trace in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from servetwin.sim.commands.flags import whole_number
from servetwin.sim.commands.trace_flags import (
    DRAW,
    READ,
    TRACE_HELP,
    WRITING,
    DrawFlags,
    ReadFlags,
    WriteFlags,
)


def convert(
    path: Annotated[Path, Parameter(help=TRACE_HELP)],
    /,
    *,
    write: WriteFlags,
    to: Annotated[
        Literal["servetwin", "mooncake"],
        Parameter(
            group=WRITING, help="servetwin: our own, without loss. mooncake: JSON lines for other tools."
        ),
    ] = "servetwin",
    to_block_size: Annotated[
        int | None,
        Parameter(
            group=WRITING,
            converter=whole_number,
            help="Tokens per hash id of --to mooncake (default: 512); ids of other sizes are split or joined.",
        ),
    ] = None,
    read: ReadFlags = READ,
    draw: DrawFlags = DRAW,
) -> int:
    """Write a trace as our JSONL or Parquet (told by the ending of --out), or as Mooncake's JSON lines."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.trace_making import finish, opened, progress, tell
    from servetwin.workloads.export import write_mooncake
    from servetwin.workloads.to_mooncake import BLOCK_TOKENS

    if to != "mooncake":
        if to_block_size is not None:
            raise UsageError("--to-block-size goes with --to mooncake")
        return finish(opened(path, read, draw), write)
    making = opened(path, read, draw)
    with progress(len(making.requests)) as wrote:
        making.notes += write_mooncake(
            write.out,
            making.requests,
            arrivals=making.arrivals,
            block_tokens=BLOCK_TOKENS if to_block_size is None else to_block_size,
            overwrite=write.overwrite,
            wrote=wrote,
        )
    return tell(making, write)
