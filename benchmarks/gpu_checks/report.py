"""The report of one run of the check: one JSON file that grows row by row, written by several processes in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ALL_OF_IT = "all of it"
"""Name in `left_out` of a part that measured nothing."""
ALL_THAT_FOLLOWS = "all that follows"
"""Name in `left_out` of the rest of a part that was cut off."""


class Report:
    """The JSON file: `{"device": ..., "rows": [...], "left_out": [...], ...}`, whole at every moment.

    What lies at `path` is gone on with if it is of the same run (`header["run"]`); else it stays as it is until there
    is a row to put in its place.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{header['run']}")
        empty: Row = {"rows": [], "left_out": [], "checks": {}, "finished": []}
        self.content: Row = _content_of(path, header["run"]) or header | empty

    @property
    def has_begun(self) -> bool:
        """Whether there is something to write."""
        return bool(self.content["rows"] or self.content["left_out"])

    def update(self, **values: Any) -> None:
        """Sets keys and writes."""
        self.content |= values
        self._write()

    def append(self, key: str, row: Row | str) -> None:
        """Adds a row to a list and writes."""
        self.content[key].append(row)
        self._write()

    def tidy_up(self) -> None:
        """Removes what a process that was killed while it wrote has left beside the report."""
        self._temporary.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.has_begun:
            self._temporary.write_text(json.dumps(self.content, indent=1))
            self._temporary.replace(self.path)


def _content_of(path: Path, run: str) -> Row | None:
    """What the file holds if this run has written it."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("run") == run else None
