"""`servetwin trace merge`: several traces on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.trace_flags import (
    DRAW,
    READ,
    TRACE_HELP,
    WRITING,
    DrawFlags,
    ReadFlags,
    WriteFlags,
)


def merge(
    *paths: Annotated[Path, Parameter(help=f"Two or more. {TRACE_HELP}")],
    write: WriteFlags,
    shared_prefixes: Annotated[
        bool,
        Parameter(
            group=WRITING, negative=(), help="Equal prefix ids of different traces are the same tokens."
        ),
    ] = False,
    read: ReadFlags = READ,
    draw: DrawFlags = DRAW,
) -> int:
    """Put several traces on one clock, as if their clients used one engine: each starts at second 0."""
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.trace_making import Making, finish, opened
    from servetwin.workloads.merging import merged

    if len(paths) < 2:
        raise UsageError("two traces or more must be given to merge")
    parts = [opened(path, read, draw) for path in paths]
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
    return finish(making, write)
