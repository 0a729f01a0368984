"""`servetwin export csv`: the tables of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from servetwin.sim.commands.export_flags import CONTENT, OUTPUT, RunPath, opened
from servetwin.sim.commands.flag_kinds import flag, switch


def csv(
    run: RunPath,
    /,
    *,
    out: Annotated[
        str,
        Parameter(
            ("--out", "-o"),
            group=OUTPUT,
            help="A folder takes all tables, as requests.csv and so on. A name ending in .csv, or - for stdout: "
            "one table, that of --table.",
            allow_leading_hyphen=True,
        ),
    ],
    overwrite: Annotated[bool, switch(OUTPUT, "Replace files that are there.")] = False,
    table: Annotated[
        str | None,
        flag(
            CONTENT,
            "One of requests, steps, events, blocks, itl, tokens, into one file (default: requests, where --out is "
            "one file).",
        ),
    ] = None,
) -> int:
    """Write it; the help is that of `export.COMMANDS`."""
    from servetwin.sim.columns import SCHEMAS
    from servetwin.sim.commands.errors import UsageError
    from servetwin.sim.commands.show import say
    from servetwin.sim.export.csv_tables import csv_pieces, tables_of
    from servetwin.sim.export.writing import check_file, write, write_folder

    if table is not None and table not in SCHEMAS:
        raise UsageError(f"--table {table!r}: must be one of {', '.join(SCHEMAS)}")
    if table is None and (out == "-" or out.lower().endswith(".csv")):
        table = "requests"
    if table is None and out.startswith("-"):
        raise UsageError(f"--out {out}: must be the name of a folder or a file, or - for stdout")
    if table is not None:
        check_file(out, overwrite=overwrite)
    log = opened(run)
    there = tables_of(log)
    if table is None:
        files = {f"{name}.csv": csv_pieces(log, name) for name in there}
        write_folder(Path(out), files, overwrite=overwrite)
        say(f"{out}: {', '.join(files)}")
        return 0
    if table not in there:
        raise UsageError(f"--table {table}: {run} has none; it has {', '.join(there)}")
    write(out, csv_pieces(log, table), overwrite=overwrite)
    if out != "-":
        say(f"{out}: {table}")
    return 0
