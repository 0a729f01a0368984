"""The runs that are open, shared by all browser sessions: a few at a time, each in its latest state."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from servetwin.dashboard.folders import HEADER
from servetwin.dashboard.run_data import RunData
from servetwin.sim.runs import RunFolderError, read_run

OPEN_AT_MOST = 3
"""Runs whose columns stay in memory."""


class Library:
    """Opens run folders; asked again it gives the same object until the folder has changed."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, RunData] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path) -> RunData:
        """Raises RunFolderError for what is no run, or a damaged one; OSError where it cannot be read."""
        with self._lock:
            version_ns = version_of(path)
            known = self._open.get(path)
            if known is None or known.version_ns != version_ns:
                known = RunData(read_run(path), version_ns, known)
            self._open[path] = known
            self._open.move_to_end(path)
            while len(self._open) > OPEN_AT_MOST:
                self._open.popitem(last=False)
            return known


def version_of(path: Path) -> int:
    """When the run last wrote something, in ns; RunFolderError where there is no run."""
    try:
        return (path / HEADER).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError) as e:
        raise RunFolderError(f"{path} is not a run folder: it has no {HEADER}") from e
