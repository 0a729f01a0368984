"""`servetwin fit`: step times from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def fit(
    folder: Annotated[
        Path,
        Parameter(
            help="A folder of `servetwin profile`; a run folder (`run --live`, or --executor torch); or per-kernel "
            "tables: attention.csv, dense.csv, optionally per_sequence.csv and skew.csv[.gz]."
        ),
    ],
    /,
    *more: Annotated[Path, Parameter(help="More folders of measured steps of the same model and machine.")],
    out: Annotated[
        Path | None, Parameter(("--out", "-o"), help="Profile to write (default: only the report).")
    ] = None,
    overwrite: Annotated[bool, Parameter(negative=(), help="Replace the file of --out.")] = False,
    json: Annotated[bool, Parameter(negative=(), help="Print the report as one JSON object.")] = False,
) -> int:
    """Fit step times to measurements, and tell how well those are foretold that were left out of the fit.

    Of measured steps: a physical model (non-negative sum of launch, tokens, rows, KV read, attention work) and its
    smooth correction near what was measured; the host between steps apart. Each run is left out in turn, and its steps
    are foretold from everything else.

    Of tables: attention is interpolated as the ratio to a physical model (non-negative sum of launch, arithmetic and
    memory traffic); dense operators as a staircase in tokens.

    Errors are foretold / measured - 1. The profile serves `run --executor PROFILE` and `validate --profile PROFILE`.
    """
    from servetwin.sim.commands.fitting import carry_out

    return carry_out([folder, *more], out, overwrite=overwrite, json=json)
