"""Columns of a run folder, read one by one when they are asked for and kept as small as their numbers are.

A run of a million requests has no place in frames of everything; a page needs a handful of columns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from servetwin.sim.columns import NEVER, REPLICA, SCHEMAS
from servetwin.sim.runs import Run
from servetwin.sim.tables import replica_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Numbers = np.ndarray[tuple[int], np.dtype[Any]]
INT32 = np.iinfo(np.int32)


class Coded(NamedTuple):
    """A column of texts, each different one with a number."""

    codes: np.ndarray[tuple[int], np.dtype[np.int32]]
    """[rows], -1 for null."""
    texts: pa.StringArray
    """Of each number."""


class RunColumns:
    """The columns of one state of a run. Rows stand in the order in which they were written."""

    def __init__(self, run: Run, previous: RunColumns | None = None, replica: int | None = None) -> None:
        """`previous`: columns of an earlier state of the same run; what it has read is not read again.

        `replica`: only what happened there (None: everywhere).
        """
        self.run = run
        self._replica = replica
        self._replica_of: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], Numbers] = {}
        self._categories: dict[tuple[str, str], pd.Categorical] = {}
        self._coded: dict[tuple[str, str], Coded] = {}
        self._texts: dict[tuple[str, str], pa.ChunkedArray] = {}
        self._part_rows: dict[str, int] = {}
        self._known: dict[tuple[str, str], Numbers] = {}
        self._known_parts: dict[str, int] = {}
        if previous is not None and previous._is_before(run):
            self._known = dict(previous._numbers)
            self._known_parts = {table: len(previous.part_names(table)) for table in SCHEMAS}
            self._part_rows = dict(previous._part_rows)
            self._replica_of = dict(previous._replica_of)

    def part_names(self, table: str) -> Sequence[str]:
        names: Sequence[str] = self.run.header["parts"].get(table, [])
        if self._replica is None:
            return names
        return [name for name in names if self._part_replica(table, name) == self._replica]

    def replicas(self) -> list[int]:
        """Those that made a step, in order; all parts of a table are of one replica each."""
        names: Sequence[str] = self.run.header["parts"].get("steps", [])
        return sorted({self._part_replica("steps", name) for name in names} - {NEVER})

    def _part_replica(self, table: str, name: str) -> int:
        if name not in self._replica_of:
            (part,) = self.run.iter_columns(table, [REPLICA], [name])
            self._replica_of[name] = replica_of(part)
        return self._replica_of[name]

    def numbers(self, table: str, name: str) -> Numbers:
        """A column of times (s, NaN where none) or counts (NaN where there may be none), [rows]."""
        return self._read(table, name, name, _numbers)

    def load(self, table: str, names: Sequence[str]) -> None:
        """Reads these columns for `numbers` together: every part is opened once, which is most of the work."""
        missing = [n for n in names if (table, n) not in self._numbers and (table, n) not in self._known]
        if len(missing) < 2:
            return
        chunks: dict[str, list[Numbers]] = {name: [] for name in missing}
        for part in self.parts(table, missing):
            for name in missing:
                chunks[name].append(_numbers(part[name]))
        for name, read in chunks.items():
            self._numbers[table, name] = np.concatenate(read) if read else np.zeros(0)

    def list_lengths(self, table: str, name: str) -> Numbers:
        """Of a column of lists, how many items each has, [rows]."""
        return self._read(table, name, f"length of {name}", _lengths)

    def _read(self, table: str, name: str, what: str, of: Callable[[pa.ChunkedArray], Numbers]) -> Numbers:
        key = (table, what)
        if key not in self._numbers:
            known = self._known.pop(key, None)
            first = 0 if known is None else self._known_parts[table]
            chunks = [] if known is None else [known]
            chunks += [of(part[name]) for part in self.parts(table, [name], first)]
            self._numbers[key] = np.concatenate(chunks) if chunks else np.zeros(0)
        return self._numbers[key]

    def categories(self, table: str, name: str) -> pd.Categorical:
        """A column of a few different texts, [rows]."""
        import pandas as pd

        key = (table, name)
        if key not in self._categories:
            coded = self.coded(table, name)
            categories = pd.Index(coded.texts.to_pylist(), dtype=object)
            self._categories[key] = pd.Categorical.from_codes(coded.codes, categories=categories)
        return self._categories[key]

    def coded(self, table: str, name: str) -> Coded:
        """A column of texts as numbers, with the texts that they stand for."""
        key = (table, name)
        if key not in self._coded:
            # In one piece: to bring dictionaries of many pieces together takes ten times as long.
            column = self._chunked(table, name).combine_chunks().dictionary_encode()
            codes = column.indices.fill_null(-1).to_numpy().astype(np.int32)
            self._coded[key] = Coded(codes, column.dictionary)
        return self._coded[key]

    def texts(self, table: str, name: str) -> pa.ChunkedArray:
        """A column of texts that are all different, such as ids, as Arrow has it."""
        key = (table, name)
        if key not in self._texts:
            self._texts[key] = self._chunked(table, name)
        return self._texts[key]

    def parts(self, table: str, names: Sequence[str], first: int = 0) -> Iterator[pa.Table]:
        """Parts with only the columns `names`, those that its parts have beside the table's own among them."""
        stored = self.part_names(table)[first:]
        for name, part in zip(stored, self.run.iter_columns(table, names, stored), strict=True):
            self._part_rows[name] = len(part)
            yield part

    def part_rows(self, table: str) -> Sequence[int]:
        """Rows of each part."""
        if any(name not in self._part_rows for name in self.part_names(table)):
            for _ in self.parts(table, []):
                pass
        return [self._part_rows[name] for name in self.part_names(table)]

    def row(self, table: str, place: int) -> pa.Table:
        """One row with all its columns."""
        for name, rows in zip(self.part_names(table), self.part_rows(table), strict=True):
            if place < rows:
                return self.whole_part(table, name).slice(place, 1)
            place -= rows
        raise IndexError(place)

    def whole_part(self, table: str, name: str) -> pa.Table:
        """One part with all its columns."""
        return next(self.run.iter_columns(table, None, [name]))

    def _chunked(self, table: str, name: str) -> pa.ChunkedArray:
        import pyarrow as pa

        chunks = [c for part in self.parts(table, [name]) for c in part[name].chunks]
        return pa.chunked_array(chunks, type=pa.string())

    def _is_before(self, run: Run) -> bool:
        """Whether this is an earlier state of the same run: parts are only ever added."""
        mine, its = self.run.header, run.header
        if self._replica is not None:
            return False
        same = mine.get("wall_started") == its.get("wall_started") and self.run.path == run.path
        return same and all(
            its["parts"].get(table, [])[: len(names)] == names for table, names in mine["parts"].items()
        )


def _numbers(column: pa.ChunkedArray) -> Numbers:
    values: Numbers = column.to_numpy()
    if values.dtype != np.int64:
        return values
    if len(values) and (values.min() < INT32.min or values.max() > INT32.max):
        return values
    return values.astype(np.int32)


def _lengths(column: pa.ChunkedArray) -> Numbers:
    import pyarrow.compute as pc

    lengths: Numbers = pc.list_value_length(column).fill_null(0).to_numpy()
    return lengths
