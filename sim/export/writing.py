"""Where an export goes: a file that is there whole or not at all, or stdout."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from servetwin.workloads.traces.writing import whole_file

STDOUT = "-"


class ExportTargetError(ValueError):
    """A file or folder that cannot take the export; the message says why."""


def check_file(out: str, *, overwrite: bool) -> None:
    """Raises ExportTargetError; changes nothing."""
    if out == STDOUT:
        return
    if out.startswith("-"):
        raise ExportTargetError(f"--out {out}: must be the name of a file, or - for stdout")
    path = Path(out)
    if path.is_dir():
        raise ExportTargetError(f"--out {out}: is a folder; the export is one file")
    if not path.parent.is_dir():
        raise ExportTargetError(f"--out {out}: its folder does not exist")
    if path.exists() and not overwrite:
        raise ExportTargetError(f"--out {out}: exists; --overwrite replaces it")


def write(out: str, pieces: Iterable[bytes], *, overwrite: bool) -> None:
    """Writes the pieces one after another. Raises ExportTargetError, OSError."""
    check_file(out, overwrite=overwrite)
    if out == STDOUT:
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    with whole_file(Path(out)) as unfinished, unfinished.open("wb") as file:
        for piece in pieces:
            file.write(piece)


def compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same as one gzip file."""
    import zlib

    packer = zlib.compressobj(wbits=31)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def check_folder(out: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Raises ExportTargetError for a folder that cannot take files of these names; changes nothing."""
    if out.exists() and not out.is_dir():
        raise ExportTargetError(
            f"--out {out}: is a file; all tables go into a folder, one alone (--table) into a file"
        )
    if not out.parent.is_dir():
        raise ExportTargetError(f"--out {out}: its folder does not exist")
    there = [name for name in names if (out / name).exists()]
    if there and not overwrite:
        raise ExportTargetError(f"--out {out}: {there[0]} is there already; --overwrite replaces it")


def write_folder(out: Path, files: Mapping[str, Iterable[bytes]], *, overwrite: bool) -> None:
    """Writes files into a folder, none of them before all could be written. Raises ExportTargetError, OSError."""
    check_folder(out, files, overwrite=overwrite)
    with tempfile.TemporaryDirectory(
        prefix=f".{out.name[:100]}.", suffix=".unfinished", dir=out.parent
    ) as name:
        unfinished = Path(name)
        for file_name, pieces in files.items():
            with (unfinished / file_name).open("wb") as file:
                for piece in pieces:
                    file.write(piece)
        out.mkdir(exist_ok=True)
        for file_name in files:
            (unfinished / file_name).replace(out / file_name)
