"""`servetwin report`: one run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

BUILD = "servetwin.dashboard.report:report"


def report(
    run: Annotated[
        Path, Parameter(name="RUN", help="Run folder, as written by run --out; it may be still growing.")
    ],
    /,
    *,
    out: Annotated[
        Path, Parameter(name=("--out", "-o"), help="HTML file to write.", allow_leading_hyphen=True)
    ],
    overwrite: Annotated[bool, Parameter(negative=(), help="Replace the file of --out.")] = False,
    metric_defs: Annotated[
        str | None,
        Parameter(
            help="Whose definitions of the latencies: vllm-bench, vllm-server, guidellm or inference-perf "
            "(default: those of the run's own summary). The formulas stand in the report."
        ),
    ] = None,
    json: Annotated[
        bool, Parameter(negative=(), help="Print the file and its size in bytes as one JSON object.")
    ] = False,
) -> int:
    """Write a run as one HTML file: charts, key figures, configuration, caveats, formulas.

    The file holds everything it needs and asks no network for anything; it opens from disk, prints, and follows the
    reader's light or dark scheme. Times are in the run's own clock.
    """
    from servetwin.sim.commands.show import print_json, say
    from servetwin.sim.plugins import load
    from servetwin.sim.run_files import write_whole

    _check_out(out, overwrite=overwrite)
    build = load("servetwin.dashboards", BUILD)
    page: bytes = build(run, metric_defs).encode()
    write_whole(out, page)
    if json:
        print_json({"file": str(out), "file_bytes": len(page)})
    else:
        say(f"report {out}: {len(page) / 1e6:,.2f} MB")
    return 0


def _check_out(out: Path, *, overwrite: bool) -> None:
    """Raises UsageError when no report can be written there."""
    from servetwin.sim.commands.errors import UsageError

    if str(out).startswith("-"):
        raise UsageError(f"--out {out}: must be the name of an HTML file")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; it takes the name of an HTML file")
    if out.exists() and not overwrite:
        raise UsageError(f"--out {out} exists; choose another file, or --overwrite it")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
