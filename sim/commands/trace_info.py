"""`servetwin trace info`: what a trace is like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import whole_number
from servetwin.sim.commands.trace_flags import READ, TRACE_HELP, ReadFlags


def info(
    path: Annotated[Path, Parameter(help=TRACE_HELP)],
    /,
    *,
    json: Annotated[bool, Parameter(negative=(), help="Print the figures as one JSON object.")] = False,
    seed: Annotated[
        int,
        Parameter(
            converter=whole_number, help="Root of what is drawn, for traces that are generated (ServeGen)."
        ),
    ] = 0,
    read: ReadFlags = READ,
) -> int:
    """Say what a trace is like, and what would mislead who replays it."""
    from servetwin.sim.commands.show import print_json, results_console
    from servetwin.sim.commands.trace_making import options_of
    from servetwin.sim.commands.trace_report import report
    from servetwin.workloads import Tolerance, read_trace
    from servetwin.workloads.statistics import trace_figures

    figures = trace_figures(read_trace(path, options_of(read, Tolerance.LENIENT, seed)))
    if json:
        print_json(figures.to_json())
        return 0
    console = results_console()
    for part in report(figures, console.width):
        console.print(part, markup=False, highlight=False)
    return 0
