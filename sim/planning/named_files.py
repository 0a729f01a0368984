"""Files that the fields of a run name, as digests: a run is the same only while their bytes are."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from servetwin.sim.commands.recorded_source import PREFIX as RECORDED
from servetwin.sim.runs import WORKLOAD
from servetwin.sim.steptime.shipped import shipped_profiles

CHUNK_BYTES = 1 << 20
READ_IN_PART = {"model": "config.json", "workload": WORKLOAD}
"""Field -> the file of a folder that alone is read, where there is one."""
_ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""module:attribute"""


class FileDigests:
    """Digests of files and folders, each read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, Path], str] = {}

    def of(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Field -> sha256 (hex) of what its value names; values that name nothing on disk are left out.

        `values`: Paths, and texts: the workload, the executor, and module:attribute may name a file, too.
        """
        named = {name: _path_of(name, v) for name, v in values.items() if isinstance(v, str | Path)}
        return {name: self._digest(name, path) for name, path in named.items() if path is not None}

    def _digest(self, name: str, path: Path) -> str:
        key = (READ_IN_PART.get(name), path)
        if key not in self._known:
            total = hashlib.sha256()
            for file in _files(name, path):
                total.update(str(file.relative_to(path)).encode() + b"\0")
                total.update(_bytes_digest(file))
            self._known[key] = total.hexdigest()
        return self._known[key]


def _path_of(name: str, value: str | Path) -> Path | None:
    text = str(value)
    if name == "executor":
        text = text.removeprefix(RECORDED)
    if (isinstance(value, Path) or name in ("workload", "executor")) and Path(text).exists():
        return Path(text)
    if name == "executor" and text in shipped_profiles():
        return shipped_profiles()[text]
    return _module_file(text) if _ATTRIBUTE.fullmatch(text) else None


def _module_file(value: str) -> Path | None:
    """The source of somebody's own module, found without importing it."""
    search: list[str] | None = [*sys.path, str(Path.cwd())]
    for part in value.partition(":")[0].split("."):
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return None
        search = None if spec.submodule_search_locations is None else [*spec.submodule_search_locations]
    return Path(spec.origin) if spec is not None and spec.origin else None


def _files(name: str, path: Path) -> Iterator[Path]:
    """The files that are read, in a fixed order: of a model's folder its configuration, of a run as workload its
    requests alone.
    """
    alone = path / READ_IN_PART.get(name, "")
    if not path.is_dir():
        yield path
    elif alone.is_file():
        yield alone
    else:
        yield from sorted(file for file in path.rglob("*") if file.is_file())


def _bytes_digest(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
