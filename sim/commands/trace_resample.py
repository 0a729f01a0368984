"""`servetwin trace resample`: more requests like those of a trace."""

from __future__ import annotations

from typing import Annotated

from servetwin.sim.commands.flag_kinds import count
from servetwin.sim.commands.trace_flags import OPEN, WRITING, OpenFlags, TracePath, WriteFlags


def resample(
    path: TracePath,
    /,
    *,
    write: WriteFlags,
    num_prompts: Annotated[int, count(WRITING, "Requests to draw.", "--num-prompts", "-n")],
    read: OpenFlags = OPEN,
) -> int:
    """Draw requests of a trace with replacement (a bootstrap), each with the gap before it; sessions as a whole."""
    from servetwin.sim.commands.flag_names import flags_named
    from servetwin.sim.commands.trace_making import finish, opened
    from servetwin.workloads.resampling import resampled

    making = opened(path, read)
    before = len(making.requests)
    with flags_named(n="--num-prompts"):
        making.requests = resampled(making.requests, n=num_prompts, seed=read.seed)
    making.note(f"drawn with replacement from {before:,} requests (seed {read.seed})")
    return finish(making, write)
