"""Reads csv column by column: whole columns of good cells at once, one by one where some are damaged."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.spec import MAX_TOKENS, WorkloadError
from servetwin.workloads.traces.options import NS_PER, TimeUnit
from servetwin.workloads.traces.rows import BATCH_ROWS, IntArray, Rows
from servetwin.workloads.traces.source import Source
from servetwin.workloads.traces.values import MAX_TIME_NS, Damage, count, time_ns

if TYPE_CHECKING:
    import pyarrow as pa

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
MAX_NUMBER_CHARACTERS = 40
HEADER_SHOWN = 400
"""Characters of a header that a message shows."""


@dataclass(frozen=True)
class Kind:
    """What the cells of a column hold."""

    one: Callable[[str, str], Any]
    """(name, cell) -> value; raises Damage."""
    many: Callable[[pa.StringArray], NDArray[Any] | list[Any] | None]
    """All cells at once; None where some may be damaged: then they are taken one by one."""


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind


class CsvColumns:
    """Some rows of a csv file in columns."""

    def __init__(self, numbers: IntArray, values: Mapping[str, NDArray[Any] | list[Any]]) -> None:
        self.numbers = numbers
        """1-based data rows."""
        self._values = values

    def __getitem__(self, name: str) -> NDArray[Any]:
        values = self._values[name]
        return values if isinstance(values, np.ndarray) else np.array(values)

    def list(self, name: str) -> list[Any]:
        """Of a column that may hold None."""
        return list(self._values[name])


def each_batch(
    source: Source, rows: Rows, columns: Sequence[Column], *, header: Sequence[str] | None = None
) -> Iterator[CsvColumns]:
    """The wanted columns of a csv file, some thousand rows at a time, without damaged ones (which are accounted for).

    `header`: of a file that has none. Raises WorkloadError for a column that is missing or there twice.
    """
    lines = source.lines()
    if header is None:
        header = read_header(next(filter(str.strip, lines), ""))
    layout = _Layout(tuple(header), tuple(columns), tuple(_place(source, header, c.name) for c in columns))
    number = 1
    for batch in _batches(lines, len(header)):
        yield _columns_of(number, batch, rows, layout)
        number += len(batch)


def read_header(line: str) -> list[str]:
    """The names in the first line of a csv file."""
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error:
        # A name too long for the csv module: none that is wanted, but the others may be.
        cells = line.split(",")
    return [cell.strip() for cell in cells]


@dataclass(frozen=True)
class _Layout:
    header: tuple[str, ...]
    columns: tuple[Column, ...]
    places: tuple[int, ...]
    """Of the columns in the header."""


def _batches(lines: Iterator[str], width: int) -> Iterator[pa.Table | list[str]]:
    """The rows, blank lines left out: as columns of texts where nothing is odd about them, else as lines.

    A row is a line: were a quoted cell to go on in the next one, a stray quote would swallow all rows behind it.
    """
    while chunk := list(islice(lines, BATCH_ROWS)):
        text = "\n".join(chunk)
        closed = '"' not in text or not any(line.count('"') % 2 for line in chunk)
        table = _plain_table(text, width) if closed else None
        if table is None:
            if filled := [line for line in chunk if line.strip()]:
                yield filled
        elif table.num_rows:
            yield table


def _plain_table(text: str, width: int) -> pa.Table | None:
    """Lines in columns of texts; None where not all of them have `width` cells."""
    import pyarrow as pa
    import pyarrow.csv

    names = [str(place) for place in range(width)]
    try:
        return pyarrow.csv.read_csv(
            io.BytesIO(text.encode()),
            pyarrow.csv.ReadOptions(column_names=names, use_threads=False),
            pyarrow.csv.ParseOptions(),
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        ).combine_chunks()
    except pa.ArrowInvalid:
        return None


def _place(source: Source, header: Sequence[str], name: str) -> int:
    if list(header).count(name) != 1:
        found = "twice or more in" if name in header else "not in"
        names = ",".join(header)[:HEADER_SHOWN]
        raise WorkloadError(f"{source.path}: column {name!r} is {found} the header {names!r}")
    return list(header).index(name)


def _columns_of(number: int, batch: pa.Table | list[str], rows: Rows, layout: _Layout) -> CsvColumns:
    """Of rows numbered from `number` on."""
    if isinstance(batch, list):
        return _one_by_one(number, batch, rows, layout)
    found: dict[str, NDArray[Any] | list[Any]] = {}
    for column, place in zip(layout.columns, layout.places, strict=True):
        values = column.kind.many(batch.column(place).chunk(0))
        if values is None:
            cells = zip(*(c.to_pylist() for c in batch.columns), strict=True)
            return _one_by_one(number, cells, rows, layout)
        found[column.name] = values
    return CsvColumns(np.arange(number, number + batch.num_rows), found)


def _one_by_one(number: int, batch: Iterable[str | Sequence[str]], rows: Rows, layout: _Layout) -> CsvColumns:
    numbers: list[int] = []
    values: dict[str, list[Any]] = {column.name: [] for column in layout.columns}
    for row, line in enumerate(batch, start=number):
        try:
            cells = _cells(line) if isinstance(line, str) else line
            _check_width(cells, layout.header)
            pairs = zip(layout.columns, layout.places, strict=True)
            parsed = [column.kind.one(column.name, cells[place]) for column, place in pairs]
        except Damage as e:
            rows.damaged(row, e)
            continue
        numbers.append(row)
        for column, value in zip(layout.columns, parsed, strict=True):
            values[column.name].append(value)
    return CsvColumns(np.array(numbers, dtype=np.int64), values)


def _cells(line: str) -> list[str]:
    if line.count('"') % 2:
        raise Damage("row", line, "csv whose quotes are closed in the line")
    try:
        return next(csv.reader([line]), [])
    except csv.Error as e:
        raise Damage("row", line, f"csv ({e})") from e


def _check_width(cells: Sequence[str], header: Sequence[str]) -> None:
    if len(cells) < len(header):
        raise Damage(header[len(cells)], None, "there; the row ends before it")
    if len(cells) > len(header):
        raise Damage("row", ",".join(cells), f"the {len(header)} fields {','.join(header)}")


# ---------------------------------------------------------------- kinds of cells


def _one_count(name: str, cell: str) -> int:
    cell = cell.strip()
    if not (cell.isascii() and cell.isdigit() and len(cell) <= MAX_NUMBER_CHARACTERS):
        raise Damage(name, cell, "a whole number, 0 or more")
    return count(name, int(cell))


def _has_long(cells: pa.StringArray) -> bool:
    """Arrow would take numbers of any length."""
    import pyarrow.compute as pc

    return (pc.max(pc.binary_length(cells)).as_py() or 0) > MAX_NUMBER_CHARACTERS


def _many_wholes(cells: pa.StringArray) -> IntArray | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    # Arrow alone would take 0x1f.
    if _has_long(cells) or not pc.all(pc.utf8_is_digit(cells)).as_py():
        return None
    try:
        numbers: IntArray = cells.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return None
    return numbers


def _many_counts(cells: pa.StringArray) -> IntArray | None:
    numbers = _many_wholes(cells)
    return numbers if numbers is not None and numbers.max(initial=0) <= MAX_TOKENS else None


COUNT = Kind(_one_count, _many_counts)
"""A whole number of tokens."""


def _one_float_count(name: str, cell: str) -> int:
    return count(name, _one_number(name, cell))


FLOAT_COUNT = Kind(_one_float_count, _many_counts)
"""A whole number of tokens that may be written as 12.0."""


def _one_number(name: str, cell: str) -> float:
    cell = cell.strip()
    if not _NUMBER.fullmatch(cell) or len(cell) > MAX_NUMBER_CHARACTERS or not math.isfinite(float(cell)):
        raise Damage(name, cell, "a finite number")
    return float(cell)


def _many_numbers(cells: pa.StringArray) -> NDArray[np.float64] | None:
    import pyarrow as pa

    if _has_long(cells):
        return None
    try:
        values: NDArray[np.float64] = cells.cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        return None
    return values if np.isfinite(values).all() else None


NUMBER = Kind(_one_number, _many_numbers)


def time_in(unit: TimeUnit) -> Kind:
    """Times in `unit`, as ns."""

    def one(name: str, cell: str) -> int:
        # Whole numbers stay whole: a float of ns since 1970 would lose the last digits.
        text = cell.strip()
        whole = text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_CHARACTERS
        return time_ns(name, int(text) if whole else _one_number(name, cell), unit)

    def many(cells: pa.StringArray) -> IntArray | None:
        numbers: NDArray[Any] | None = _many_wholes(cells)
        if numbers is None:
            numbers = _many_numbers(cells)
        if numbers is None or not ((numbers >= 0) & (numbers <= MAX_TIME_NS / NS_PER[unit])).all():
            return None
        return np.rint(numbers * NS_PER[unit]).astype(np.int64)

    return Kind(one, many)


TIME_ALLOWED = "a time like 2023-11-16 18:17:03.9799600, or with +00:00 or Z behind it"


def _one_date(name: str, cell: str) -> int:
    """Integer arithmetic throughout: a float of seconds since 1970 would lose the last digits."""
    match = _TIME.fullmatch(cell)
    if match is None:
        raise Damage(name, cell, TIME_ALLOWED)
    date, clock, fraction, offset = match.groups()
    try:
        seconds = (datetime.fromisoformat(f"{date}T{clock}{offset or 'Z'}") - EPOCH) // timedelta(seconds=1)
    except ValueError as e:
        raise Damage(name, cell, TIME_ALLOWED) from e
    ns = seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
    if not 0 <= ns <= MAX_TIME_NS:
        raise Damage(name, cell, f"{TIME_ALLOWED}, from 1970 on")
    return ns


def _many_dates(cells: pa.StringArray) -> IntArray | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    # Arrow takes dates without a time of day, too.
    if pc.min(pc.utf8_length(cells)).as_py() < len("2023-11-16 18:17:03"):
        return None
    for zone in (None, "UTC"):
        try:
            ns: IntArray = cells.cast(pa.timestamp("ns", zone)).cast(pa.int64()).to_numpy()
        except pa.ArrowInvalid:
            continue
        return ns if ns.min() >= 0 and ns.max() <= MAX_TIME_NS else None
    return None


DATE = Kind(_one_date, _many_dates)
"""A date and time of day, in ns since 1970; UTC where no offset is given."""


def _one_text(name: str, cell: str) -> str | None:
    return cell.strip() or None


TEXT = Kind(_one_text, lambda cells: [cell.strip() or None for cell in cells.to_pylist()])
"""A name, or None where the cell is empty."""
