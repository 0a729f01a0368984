"""`servetwin trace resample`: more requests like those of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def resample(
    path: Annotated[Path, Parameter(help=TRACE_HELP)],
    /,
    *,
    write: WriteFlags,
    num_prompts: Annotated[
        int,
        Parameter(("--num-prompts", "-n"), group=WRITING, converter=whole_number, help="Requests to draw."),
    ],
    read: ReadFlags = READ,
    draw: DrawFlags = DRAW,
) -> int:
    """Draw requests of a trace with replacement (a bootstrap), each with the gap before it; sessions as a whole."""
    from servetwin.sim.commands.trace_making import finish, opened
    from servetwin.workloads.resampling import resampled

    making = opened(path, read, draw)
    before = len(making.requests)
    making.requests = resampled(making.requests, n=num_prompts, seed=draw.seed)
    making.note(f"drawn with replacement from {before:,} requests (seed {draw.seed})")
    return finish(making, write)
