"""`servetwin trace fit`: a synthetic model of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.flag_kinds import count
from servetwin.sim.commands.trace_flags import READ, TRACE_HELP, WRITING, ReadFlags


def fit(
    path: Annotated[Path, Parameter(help=TRACE_HELP)],
    /,
    *,
    out: Annotated[Path, Parameter(("--out", "-o"), group=WRITING, help="Model file to write: .json.")],
    overwrite: Annotated[
        bool, Parameter(group=WRITING, negative=(), help="Replace the file of --out.")
    ] = False,
    check: Annotated[
        bool,
        Parameter(
            group=WRITING,
            negative=(),
            help="Draw as many requests from the model and compare them with the trace.",
        ),
    ] = False,
    json: Annotated[
        bool, Parameter(group=WRITING, negative=(), help="Print model and comparison as one JSON object.")
    ] = False,
    seed: Annotated[
        int,
        count(WRITING, "Root of what is drawn: generated traces, the requests of --check."),
    ] = 0,
    read: ReadFlags = READ,
) -> int:
    """Fit a synthetic model to a trace: arrivals, lengths, shared prefixes, sessions.

    `servetwin trace synth` makes requests of it. What the trace does not say stays unknown in the model, and is said.
    """
    from servetwin.sim.commands.trace_fitting import FitRequest, carry_out

    return carry_out(FitRequest(path, out, overwrite, check, json, seed, read))
