"""`servetwin fit`: step times from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def fit(
    folder: Annotated[
        Path,
        Parameter(
            help="Per-kernel tables: attention.csv, dense.csv, optionally per_sequence.csv and skew.csv[.gz]."
        ),
    ],
    /,
    *,
    out: Annotated[
        Path | None, Parameter(("--out", "-o"), help="Profile to write (default: only the report).")
    ] = None,
    overwrite: Annotated[bool, Parameter(negative=(), help="Replace the file of --out.")] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print the report as one JSON object.")] = False,
) -> int:
    """Fit step times to measurements, and tell how well rows are foretold that were left out of the fit.

    Attention is interpolated as the ratio to a physical model (non-negative sum of launch, arithmetic and memory
    traffic); dense operators as a staircase in tokens. Errors are foretold / measured - 1. The profile serves
    `run --executor PROFILE` and `validate --profile PROFILE`.
    """
    from servetwin.sim.commands.fitting import carry_out

    return carry_out(folder, out, overwrite=overwrite, json=json)
