"""Finished runs, found again by what they were made of.

One small file a run, written whole under a name of its own and then renamed: a file is there with all of it or not at
all, whoever is killed when, and several processes (also of several machines on a shared file system, where a database's
locks are not to be relied on) may write at once, for records of one hash tell the same. Nothing is changed afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from servetwin.sim.planning.record import Record
from servetwin.sim.run_files import RunFolderError, write_whole, writing


class Store(Protocol):
    """Records by the hash of their spec."""

    def get(self, spec_hash: str) -> Record | None: ...

    def put(self, record: Record) -> None: ...


class MemoryStore:
    """Keeps records as long as it lives."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def get(self, spec_hash: str) -> Record | None:
        return self._records.get(spec_hash)

    def put(self, record: Record) -> None:
        self._records.setdefault(record.spec_hash, record)


class FolderStore:
    """A folder of records; it is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, spec_hash: str) -> Record | None:
        """Raises RunFolderError for a damaged record, naming the file."""
        file = self._file(spec_hash)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            record = Record.from_bytes(content)
        except ValueError as e:
            raise RunFolderError(f"{file}: damaged ({e}); without it the run is done again") from e
        if record.spec_hash != spec_hash:
            raise RunFolderError(f"{file}: holds the record of another run, {record.spec_hash}")
        return record

    def put(self, record: Record) -> None:
        """Keeps it for good; one that is there already stays as it is."""
        file = self._file(record.spec_hash)
        if file.exists():
            return
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, record.to_bytes())

    def _file(self, spec_hash: str) -> Path:
        return self._folder / f"{spec_hash}.json"
