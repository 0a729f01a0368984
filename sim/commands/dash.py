"""`servetwin dash`: runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import whole_number


def dash(
    *runs: Annotated[Path, Parameter(name="RUN", help="Run folders, as written by run --out.")],
    port: Annotated[int, Parameter(converter=whole_number, help="Port on the loopback interface.")] = 8501,
) -> int:
    """Show runs in the browser: queue and KV occupancy over time, key figures.

    Serves on 127.0.0.1 only; Ctrl-C or SIGTERM ends it.
    """
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.plugins import load

    if not runs:
        raise UsageError("dash needs at least one run folder: servetwin dash DIR")
    serve = load("servetwin.dashboards", "streamlit")
    code: int = serve([*runs], port)
    return code
