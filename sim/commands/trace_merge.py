"""`servetwin trace merge`: several traces on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import switch
from servetwin.sim.commands.trace_flags import OPEN, TRACE_HELP, WRITING, OpenFlags, WriteFlags

if TYPE_CHECKING:
    from servetwin.sim.commands.trace_making import Making


def merge(
    *paths: Annotated[Path, Parameter(help=f"Two or more. {TRACE_HELP}")],
    write: WriteFlags,
    shared_prefixes: Annotated[
        bool, switch(WRITING, "Equal prefix ids of different traces are the same tokens.")
    ] = False,
    read: OpenFlags = OPEN,
) -> int:
    """Put several traces on one clock, as if their clients used one engine: each starts at second 0."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.trace_making import Making, finish
    from servetwin.workloads.columns import known_prompts
    from servetwin.workloads.merging import merged

    if len(paths) < 2:
        raise UsageError("two traces or more must be given to merge")
    parts = _opened(paths, read)
    requests = merged([p.requests for p in parts], shared_prefixes=shared_prefixes)
    making = Making(requests, [t for p in parts for t in p.traces], [n for p in parts for n in p.notes])
    kinds = {p.arrivals for p in parts}
    # Together with others, of a trace without times later turns still wait for the ones before.
    making.arrivals = kinds.pop() if len(kinds) == 1 else "first turns"
    if requests.has("prefix_ids"):
        making.note(
            "prefix ids stand as in the traces: equal ones are shared between them"
            if shared_prefixes
            else "prefix ids are numbered anew: no two traces share one (--shared-prefixes)"
        )
    if 0 < (known := known_prompts(requests)) < len(requests):
        making.note(
            f"prefixes known for {known:,} of {len(requests):,} requests; the prompts of the others share nothing"
        )
    return finish(making, write)


def _opened(paths: tuple[Path, ...], read: OpenFlags) -> list[Making]:
    """Each of them, read with the flags that its format takes. Raises UsageError for a flag that none takes."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.trace_making import opened, options_of
    from servetwin.workloads import Tolerance
    from servetwin.workloads.traces.formats import FLAGS, usable_options

    wanted = options_of(read, Tolerance.NORMAL, read.seed)
    usable = [usable_options(path, wanted) for path in paths]
    for name in sorted(set.intersection(*(set(left_out) for _, left_out in usable))):
        raise UsageError(f"{FLAGS[name]} has no use for the formats of these traces")
    parts = []
    for path, (options, left_out) in zip(paths, usable, strict=True):
        making = opened(path, read, options)
        for name in left_out:
            making.note(f"{path}: {FLAGS[name]} has no use for the format {making.traces[0].format}")
        parts.append(making)
    return parts
