"""A folder of `servetwin profile`: single measured steps as Parquet parts, and what they were measured on.

`profile.json` (whole at any time, so that a profile may go on later) names the parts; `live/` holds run folders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from servetwin.sim.run_files import write_json, write_part, writing

PROFILE_HEADER = "profile.json"
POINTS = "points"
SCHEMA_VERSION = 1


class ProfileFolderError(ValueError):
    """A folder that is no profile, or one that something else has begun."""


@dataclass(frozen=True)
class ProfileFolder:
    """What a folder holds."""

    path: Path
    header: dict[str, Any]
    """about, engine, design, live, measured (number of points), design_complete, complete."""
    rows: Sequence[dict[str, Any]]
    """Measured points in the order of the design; `executor/profile_grid.py` says what is in them."""


def read_profile_folder(path: Path) -> ProfileFolder:
    """Raises ProfileFolderError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    header = _header(path)
    rows: list[dict[str, Any]] = []
    try:
        for part in header["parts"]:
            rows += pq.read_table(path / part).to_pylist()
    except (OSError, pa.ArrowException) as e:
        raise ProfileFolderError(f"{path}: a part that {PROFILE_HEADER} lists cannot be read: {e}") from e
    return ProfileFolder(path, header, rows)


def _header(path: Path) -> dict[str, Any]:
    file = path / PROFILE_HEADER
    try:
        header = json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise ProfileFolderError(f"{file}: is no profile of `servetwin profile` ({e})") from e
    needed = {"schema_version", "about", "engine", "design", "live", "parts", "design_complete", "complete"}
    if not isinstance(header, dict) or needed - header.keys():
        raise ProfileFolderError(f"{file}: is no profile of `servetwin profile`")
    if header["schema_version"] != SCHEMA_VERSION:
        raise ProfileFolderError(
            f"{file}: schema_version {header['schema_version']!r} is not known (allowed: {SCHEMA_VERSION})"
        )
    return header


class ProfileWriter:
    """Adds measured points to a folder, part by part."""

    def __init__(self, path: Path, header: dict[str, Any], measured: int) -> None:
        self.path = path
        self.measured = measured
        """Points in the folder."""
        self._header = header

    @classmethod
    def begin(
        cls, path: Path, *, about: dict[str, Any], engine: dict[str, Any], design: dict[str, Any]
    ) -> Self:
        """A new profile, in a folder that is empty or does not exist. Raises ProfileFolderError, OSError."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ProfileFolderError(f"{path}: is not empty, and holds no profile to go on with")
        header = {"schema_version": SCHEMA_VERSION, "about": about, "engine": engine, "design": design}
        empty = {"live": [], "parts": [], "measured": 0, "design_complete": False, "complete": False}
        writer = cls(path, header | empty, 0)
        with writing(path):
            (path / POINTS).mkdir(parents=True)
        writer._write_header()
        return writer

    @classmethod
    def resume(
        cls, path: Path, *, about: dict[str, Any], engine: dict[str, Any], design: dict[str, Any]
    ) -> Self:
        """Goes on with a profile of the same engine and design. Raises ProfileFolderError."""
        found = read_profile_folder(path)
        ours = {"engine": engine, "design": design, "about": about}
        for name, wanted in ours.items():
            for key in sorted({*wanted, *found.header[name]} - VOLATILE):
                here, there = wanted.get(key), found.header[name].get(key)
                if json.loads(json.dumps(here)) != there:
                    raise ProfileFolderError(
                        f"{path}: its {key} is {there!r}, here it is {here!r}: a profile goes on as it was begun"
                    )
        return cls(path, found.header, len(found.rows))

    @property
    def live(self) -> list[str]:
        """Run folders that belong to the profile, relative to it."""
        return list(self._header["live"])

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """The next points of the design, as one part."""
        import pyarrow as pa

        name = f"{POINTS}/{len(self._header['parts']):05}.parquet"
        write_part(self.path / name, pa.Table.from_pylist(list(rows)))
        self.measured += len(rows)
        self._header["parts"].append(name)
        self._header["measured"] = self.measured
        self._write_header()

    def end_design(self) -> None:
        """Every point of every pass is there."""
        self._header["design_complete"] = True
        self._write_header()

    def add_live(self, name: str) -> None:
        """A run folder beneath the profile's that has come to its end."""
        self._header["live"].append(name)
        self._write_header()

    def end(self, coverage: dict[str, Any]) -> None:
        """Nothing more is to be measured now."""
        self._header |= {"coverage": coverage, "complete": True}
        self._write_header()

    def _write_header(self) -> None:
        write_json(self.path / PROFILE_HEADER, self._header)


VOLATILE = frozenset({"load_average", "date", "kv_cache_bytes", "num_gpu_blocks"})
"""Entries that differ from one start of the same engine to the next."""
