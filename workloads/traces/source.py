"""Opening a plain, gzip or zstandard text file, with one clear line for whatever is wrong with it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from servetwin.workloads.spec import WorkloadError
from servetwin.workloads.traces.json_text import parse_json

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of a compressed file."""
PARQUET = b"PAR1"
"""First bytes of a Parquet file, the one binary format."""
SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
HEAD_CHARACTERS = 1 << 20
CHUNK_CHARACTERS = 1 << 20
MAX_LINE_CHARACTERS = 1 << 26
"""Of a prompt of some million token ids, or a text of as many words."""
MAX_DOCUMENT_CHARACTERS = 1 << 28
"""Of a document that is taken as a whole."""


@dataclass(frozen=True)
class Head:
    """What a file begins with; formats are told by it."""

    text: str
    """The first characters, without a byte-order mark."""
    folder: Path | None = None
    """The folder itself, where the path is one."""
    is_parquet: bool = False
    """Of a Parquet file no text is shown."""

    @cached_property
    def first_line(self) -> str:
        """The first line that is not blank, stripped; empty where there is none."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The cells of the first line, taken as the header of a csv file; none where it begins like JSON."""
        line = self.first_line
        return () if line[:1] in ("{", "[") else tuple(cell.strip().strip('"') for cell in line.split(","))

    @cached_property
    def row(self) -> dict[str, Any]:
        """The first line as a JSON object; empty where it is none."""
        if not self.first_line.startswith("{"):
            return {}
        try:
            row = parse_json(self.first_line)
        except json.JSONDecodeError:
            return {}
        return row if isinstance(row, dict) else {}

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names of the fields of the first row, also where it is too long to be in the head."""
        if self.row:
            return frozenset(self.row)
        return (
            frozenset(re.findall(r'"([^"\\]{1,60})"\s*:', self.text))
            if self.text[:1] in "{["
            else frozenset()
        )


@contextmanager
def naming(path: object, what: str = "read") -> Iterator[None]:
    """What the system refuses inside (no permission, a folder, a file that vanished) as one line with the path."""
    try:
        yield
    except OSError as e:
        raise WorkloadError(f"{path}: cannot be {what}: {e.strerror or e}") from e


class Source:
    """A trace file or folder, read from the beginning as often as wanted.

    UTF-8 with or without a byte-order mark, any line ending, compressed or not (told by the first bytes). A file
    that is missing, empty, not text or damaged raises WorkloadError, also while it is being read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.file = Path(path)
        with naming(path):
            exists, is_plain = self.file.exists(), self.file.is_file() or self.file.is_dir()
        if not exists:
            raise WorkloadError(f"{path}: no such file")
        if not is_plain:
            raise WorkloadError(f"{path}: is no regular file; a trace is read more than once: save it first")

    @cached_property
    def head(self) -> Head:
        if self.file.is_dir():
            return Head("", self.file)
        if self._is_parquet():
            return Head("", is_parquet=True)
        with self._open() as stream:
            text = stream.read(HEAD_CHARACTERS)
        if "\0" in text:
            raise WorkloadError(f"{self.path}: is a binary file; a trace is text")
        head = Head(text.lstrip())
        if not head.text:
            raise WorkloadError(f"{self.path}: is empty")
        return head

    def lines(self) -> Iterator[str]:
        """Every line, without its ending."""
        rest = ""
        for chunk in self.chunks():
            # Not splitlines: it splits at characters that texts may hold, too.
            lines = (rest + chunk).split("\n")
            rest = lines.pop()
            if len(rest) > MAX_LINE_CHARACTERS:
                raise WorkloadError(
                    f"{self.path}: has a line of more than {MAX_LINE_CHARACTERS:,} characters"
                )
            yield from lines
        if rest:
            yield rest

    def chunks(self) -> Iterator[str]:
        """The whole text in pieces."""
        with self._open() as stream:
            while chunk := stream.read(CHUNK_CHARACTERS):
                yield chunk

    def document(self) -> str:
        """The whole text."""
        with self._open() as stream:
            text = stream.read(MAX_DOCUMENT_CHARACTERS)
            if stream.read(1):
                raise WorkloadError(f"{self.path}: has more than {MAX_DOCUMENT_CHARACTERS:,} characters")
            return text

    def _is_parquet(self) -> bool:
        with naming(self.path), self.file.open("rb") as stream:
            return stream.read(len(PARQUET)) == PARQUET

    @contextmanager
    def _open(self) -> Iterator[io.TextIOWrapper]:
        try:
            with naming(self.path), _text(self.file) as stream:
                yield stream
        except UnicodeDecodeError as e:
            raise WorkloadError(
                f"{self.path}: is not UTF-8 text ({e.reason} at byte {e.start} of a chunk)"
            ) from e


def _text(file: Path) -> io.TextIOWrapper:
    compression = _compression(file)
    if compression is None:
        return file.open(encoding="utf-8-sig")
    # Arrow's streams read several members in a row and refuse a truncated one; zstandard's own do not refuse.
    import pyarrow as pa

    return io.TextIOWrapper(pa.input_stream(str(file), compression=compression), encoding="utf-8-sig")


def _compression(file: Path) -> str | None:
    with file.open("rb") as stream:
        first = stream.read(4)
    for magic, name in COMPRESSIONS.items():
        if first.startswith(magic):
            return name
    # Its name says so and its content does not: let the decompressor say what is wrong with it.
    return SUFFIXES.get(file.suffix) if first else None
