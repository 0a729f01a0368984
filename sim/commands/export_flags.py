"""What the commands of `servetwin export` share: the run, the output, and how both are checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from servetwin.sim.commands.flag_kinds import switch

if TYPE_CHECKING:
    from servetwin.sim.runs import Run

OUTPUT = Group("Output", sort_key=0)
CONTENT = Group("Content", sort_key=1)
RunPath = Annotated[Path, Parameter(help="Run folder, as written by run --out.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """One file, or stdout."""

    out: Annotated[
        str,
        Parameter(
            ("--out", "-o"), group=OUTPUT, help="File to write; - for stdout.", allow_leading_hyphen=True
        ),
    ]
    overwrite: Annotated[bool, switch(OUTPUT, "Replace the file of --out.")] = False


def opened(path: Path) -> Run:
    """A run to export, of which everything has been written. What broke off is said on stderr."""
    from servetwin.sim.commands.show import say
    from servetwin.sim.runs import RunFolderError, read_run

    run = read_run(path)
    if run.state == "running":
        raise RunFolderError(f"{path}: the run has not ended")
    if run.state != "complete":
        why = f"failed ({run.reason})" if run.state == "failed" else "broke off (its process was killed)"
        say(f"note: {path}: the run {why}; this is what was written until then")
    return run


def wrote(flags: FileFlags, what: str) -> int:
    """Says what was written, unless that went to stdout; the exit code."""
    from servetwin.sim.commands.show import say

    if flags.out != "-":
        say(f"{flags.out}: {what}")
    return 0
