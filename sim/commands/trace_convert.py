"""`servetwin trace convert`: a trace in another format."""

from __future__ import annotations

from typing import Annotated, Literal

from servetwin.sim.commands.flag_kinds import count, flag
from servetwin.sim.commands.trace_flags import OPEN, WRITING, OpenFlags, TracePath, WriteFlags


def convert(
    path: TracePath,
    /,
    *,
    write: WriteFlags,
    to: Annotated[
        Literal["servetwin", "mooncake"],
        flag(WRITING, "servetwin: our own, without loss. mooncake: JSON lines for other tools."),
    ] = "servetwin",
    to_block_size: Annotated[
        int | None,
        count(
            WRITING,
            "Tokens per hash id of --to mooncake (default: 512); ids of other sizes are split or joined.",
        ),
    ] = None,
    read: OpenFlags = OPEN,
) -> int:
    """Write a trace as our JSONL or Parquet (told by the ending of --out), or as Mooncake's JSON lines."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.flag_names import flags_named
    from servetwin.sim.commands.trace_making import finish, opened, progress, tell
    from servetwin.workloads.export import write_mooncake
    from servetwin.workloads.to_mooncake import BLOCK_TOKENS

    if to != "mooncake":
        if to_block_size is not None:
            raise UsageError("--to-block-size goes with --to mooncake")
        return finish(opened(path, read), write)
    making = opened(path, read)
    with progress(len(making.requests)) as wrote, flags_named(block_tokens="--to-block-size"):
        making.notes += write_mooncake(
            write.out,
            making.requests,
            arrivals=making.arrivals,
            block_tokens=BLOCK_TOKENS if to_block_size is None else to_block_size,
            overwrite=write.overwrite,
            wrote=wrote,
        )
    return tell(making, write)
