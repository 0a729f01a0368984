"""`servetwin trace cut`: a part of a trace."""

from __future__ import annotations

from typing import Annotated

from servetwin.sim.commands.flag_kinds import count, flag
from servetwin.sim.commands.trace_flags import OPEN, WRITING, OpenFlags, TracePath, WriteFlags


def cut(
    path: TracePath,
    /,
    *,
    write: WriteFlags,
    start: Annotated[
        float | None, flag(WRITING, "Keep what arrives from this second on; it becomes second 0.")
    ] = None,
    end: Annotated[float | None, flag(WRITING, "Keep what arrives before this second.")] = None,
    first: Annotated[int | None, count(WRITING, "Keep the first N of these in order of arrival.")] = None,
    read: OpenFlags = OPEN,
) -> int:
    """Keep a window of time, or the first requests."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.flag_names import flags_named
    from servetwin.sim.commands.trace_making import finish, opened
    from servetwin.workloads.transform import cut as window
    from servetwin.workloads.transform import first_of

    if start is None and end is None and first is None:
        raise UsageError("say what to keep: --start and --end in seconds, or --first N")
    making = opened(path, read)
    whole = making.requests
    with flags_named(start_s="--start", end_s="--end", n="--first"):
        if start is not None or end is not None:
            making.require_times("cut by")
            making.requests = window(making.requests, start_s=start or 0.0, end_s=end)
        if first is not None:
            making.requests = first_of(making.requests, first)
    if start:
        making.note(f"times count from second {start:g} of {path}, which is now 0")
    if split := _split_sessions(whole.values("session_id"), making.requests.values("session_id")):
        making.note(f"{split:,} sessions are cut: some of their turns are left out")
    return finish(making, write)


def _split_sessions(whole: list[str | None], kept: list[str | None]) -> int:
    """Sessions of which some turns are kept and some are not."""
    from collections import Counter

    before, after = Counter(whole), Counter(kept)
    return sum(after[name] < before[name] for name in after if name is not None)
