"""Which runs there are to look at: run folders as given, and the runs below any other folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

HEADER = "run.json"
DEEPEST = 4
"""Folders below one that is given in which runs are looked for."""
RUNS_AT_MOST = 2_000
"""Runs that are listed: a sweep may have written more than anybody reads."""


def runs_of(folders: Iterable[Path]) -> list[Path]:
    """Run folders in the order given; of a folder that is no run those below it, in order of their names.

    A folder without any stays in the list, so that whoever opens it is told what it lacks.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        below = [folder] if (folder / HEADER).exists() else [*_runs_below(folder, DEEPEST)]
        found |= dict.fromkeys(below or [folder])
    return [*found][:RUNS_AT_MOST]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """A run has no runs below it, so its tables are not walked through."""
    try:
        with os.scandir(folder) as entries:
            folders = sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return
    for below in folders:
        if (below / HEADER).is_file():
            yield below
        elif depth > 1:
            yield from _runs_below(below, depth - 1)


def labels(runs: Iterable[Path]) -> dict[Path, str]:
    """A short name for each run: its path without what all of them share."""
    runs = [*runs]
    if not runs:
        return {}
    shared = Path(os.path.commonpath([str(run.parent) for run in runs]))
    return {run: str(run.relative_to(shared)) for run in runs}
