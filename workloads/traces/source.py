"""Opening a plain, gzip or zstandard text file, with one clear line for whatever is wrong with it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from servetwin.workloads.spec import WorkloadError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@contextmanager
def open_lines(path: str | Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Gives the first line that is not blank, and all lines of the file from its beginning.

    UTF-8 with or without a byte-order mark, any line ending. A file that is missing, a folder, empty, not
    text or damaged raises WorkloadError, also while its lines are being read.
    """
    file = Path(path)
    if not file.exists():
        raise WorkloadError(f"{path}: no such file")
    if file.is_dir():
        raise WorkloadError(f"{path}: is a folder; a trace is a file")
    try:
        with _text(file) as text:
            yield _with_first_line(path, text)
    except UnicodeDecodeError as e:
        raise WorkloadError(f"{path}: is not UTF-8 text ({e.reason} at byte {e.start} of a chunk)") from e
    except OSError as e:
        raise WorkloadError(f"{path}: cannot be read: {e}") from e


def _text(file: Path) -> io.TextIOWrapper:
    compression = COMPRESSIONS.get(file.suffix)
    if compression is None:
        return file.open(encoding="utf-8-sig")
    # Arrow's streams read several members in a row and refuse a truncated one; zstandard's own do not refuse.
    import pyarrow as pa

    return io.TextIOWrapper(pa.input_stream(str(file), compression=compression), encoding="utf-8-sig")


def _with_first_line(path: str | Path, text: io.TextIOWrapper) -> tuple[str, Iterator[str]]:
    blank: list[str] = []
    for line in text:
        if "\0" in line:
            raise WorkloadError(f"{path}: is a binary file; a trace is text")
        if line.strip():
            return line.strip(), chain(blank, [line], text)
        blank.append(line)
    raise WorkloadError(f"{path}: is empty")
