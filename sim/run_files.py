"""Files that survive a killed process: written whole and then renamed, or readable as far as written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

if TYPE_CHECKING:
    import pyarrow as pa

TEMPORARY = ".tmp"


class RunFolderError(ValueError):
    """A folder that cannot be used as asked: not empty, no run, damaged. The message says which."""


class RunWriteError(OSError):
    """The run folder cannot be written (disk full, folder gone, no permission)."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an operating system error into one RunWriteError that names the file."""
    try:
        yield
    except OSError as e:
        raise RunWriteError(e.errno, f"cannot write {path}: {e.strerror or e}") from e


def write_whole(path: Path, content: bytes | memoryview | pa.Buffer) -> None:
    """Writes a file so that `path` either has all of it or is as before, also after a loss of power."""
    # A name of its own: another process may be writing the same file.
    temporary = path.with_name(f"{path.name}.{uuid4().hex}{TEMPORARY}")
    with writing(path):
        try:
            with temporary.open("wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Makes a rename durable; where folders cannot be opened (Windows) there is nothing to do."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """One JSON object, whole or not at all; NaN is written as null."""
    write_whole(path, orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def write_part(path: Path, table: pa.Table) -> None:
    """One Parquet part (zstd), whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Numbers and ids differ from row to row: looking for equal ones takes time and makes the file no smaller.
    texts = [f.name for f in table.schema if pa.types.is_string(f.type) and f.name != "request_id"]
    places = [(f.name, f.type) for f in table.schema]
    places = [
        (f"{name}.list.element", t.value_type) if pa.types.is_list(t) else (name, t) for name, t in places
    ]
    buffer = pa.BufferOutputStream()
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        use_dictionary=texts,
        column_encoding={name: "DELTA_BINARY_PACKED" for name, t in places if pa.types.is_integer(t)},
        # A part is read whole.
        write_statistics=False,
    )
    write_whole(path, buffer.getvalue())


LINES_AT_ONCE = 128
"""Given to the compressor in one piece."""


class JsonLines:
    """A stream of JSON objects, one a line, compressed into one zstandard frame.

    `flush` ends a block of the frame: whatever was written before it can be read although the frame is open,
    so that a killed run keeps it. Use as a context manager, or call `close`.
    """

    def __init__(self, path: Path) -> None:
        import zstandard

        self.path = path
        with writing(path):
            self._file = path.open("wb")
        self._stream = zstandard.ZstdCompressor().stream_writer(self._file, closefd=False)
        self._flush_block, self._flush_frame = zstandard.FLUSH_BLOCK, zstandard.FLUSH_FRAME
        self._lines: list[bytes] = []
        """Those that the stream has not been given."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one object as a line."""
        self.write_line(orjson.dumps(row))

    def write_line(self, line: bytes) -> None:
        """Appends an object that is JSON already."""
        self._lines.append(line)
        if len(self._lines) == LINES_AT_ONCE:
            with writing(self.path):
                self._give_lines()

    def _give_lines(self) -> None:
        if self._lines:
            # The last one ends, too.
            self._stream.write(b"\n".join([*self._lines, b""]))
            self._lines.clear()

    def flush(self) -> None:
        """Hands everything written so far to the operating system."""
        with writing(self.path):
            self._give_lines()
            self._stream.flush(self._flush_block)
            self._file.flush()

    def close(self) -> None:
        """Ends the frame; a second call has no effect."""
        if self._file.closed:
            return
        with writing(self.path), self._file:
            self._give_lines()
            self._stream.flush(self._flush_frame)
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a `JsonLines` file in order; of one whose writer was killed, those up to the last flush.

    Raises RunFolderError, naming the line, for content that is not such a file.
    """
    import zstandard

    try:
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            yield from _lines(reader, path)
    except (zstandard.ZstdError, OSError) as e:
        raise RunFolderError(f"{path}: cannot be read: {e}") from e


def _lines(reader: Any, path: Path) -> Iterator[dict[str, Any]]:
    rest, number = b"", 0
    while chunk := reader.read(1 << 20):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as e:
                raise RunFolderError(f"{path}: line {number} is not JSON: {e}") from e
