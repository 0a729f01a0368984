"""`servetwin trace scale`: the same requests, faster or slower."""

from __future__ import annotations

from typing import Annotated

from servetwin.sim.commands.flag_kinds import flag
from servetwin.sim.commands.trace_flags import OPEN, WRITING, OpenFlags, TracePath, WriteFlags


def scale(
    path: TracePath,
    /,
    *,
    write: WriteFlags,
    speed_up: Annotated[
        float | None, flag(WRITING, "2 sends twice as fast: every time is divided by it.")
    ] = None,
    rate: Annotated[
        float | None,
        flag(
            WRITING,
            "Requests/s to reach, counted as all requests (of sessions: all turns) over the span of arrivals.",
        ),
    ] = None,
    read: OpenFlags = OPEN,
) -> int:
    """Send the same requests faster or slower: --speed-up says how many times, --rate says to how many a second."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.flag_names import flags_named
    from servetwin.sim.commands.trace_making import finish, opened
    from servetwin.workloads.transform import scaled, speed_up_for

    if (speed_up is None) == (rate is None):
        raise UsageError("one of --speed-up and --rate must be given, and only one")
    making = opened(path, read)
    making.require_times("scale")
    with flags_named(speed_up="--speed-up", rate_per_s="--rate"):
        factor = speed_up_for(making.requests, rate) if rate is not None else speed_up
        assert factor is not None, "one of them is given"
        making.requests = scaled(making.requests, speed_up=factor)
    turns = ", all turns counted" if making.requests.has("session_id") else ""
    reached = "" if rate is None else f" reaches rate {rate:g} requests/s{turns}"
    also = [what for name, what in _ALSO.items() if making.requests.has(name)]
    making.note(f"speed-up {factor:.6g}{reached}: {' and '.join(['arrivals', *also])} divided by it")
    if making.arrivals == "first turns":
        making.note(
            "later turns are sent when the turn before has ended, so a run serves them later than this rate counts them"
        )
    making.result = {"speed_up": factor}
    return finish(making, write)


_ALSO = {"think_time_s": "think times", "abort_s": "times of giving up"}
