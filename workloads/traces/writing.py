"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.source import SUFFIXES, naming


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what becomes `path` when the block ends well; else nothing is left and `path` is as it was."""
    # What a link names is replaced, not the link.
    path = Path(os.path.realpath(path))
    with naming(path, "written"):
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".unfinished", dir=path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        unfinished.chmod(0o666 & ~_umask())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _umask() -> int:
    """The mask of new files, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, compressed where the name ends in .gz or .zst.

    Raises WorkloadError for numbers beyond 64 bits, which readers of JSON take for floats.
    """
    with whole_file(path) as unfinished, _open_for_writing(unfinished, SUFFIXES.get(path.suffix)) as out:
        for number, row in enumerate(rows, start=1):
            try:
                out.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            except orjson.JSONEncodeError as e:
                raise WorkloadError(
                    f"{path}: row {number}: {e}: cannot be said in JSON; a .parquet can hold it"
                ) from e


def _open_for_writing(path: Path, compression: str | None) -> BinaryIO:
    if compression is None:
        return path.open("wb")
    import pyarrow as pa

    stream: BinaryIO = pa.output_stream(str(path), compression=compression)
    return stream
