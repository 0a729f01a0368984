"""Rows of csv files as whole columns, for formats whose rows depend on one another: the turns of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.traces.csv_rows import CsvColumns
from servetwin.workloads.traces.rows import BoolArray, IntArray


def selected(
    rows: CsvColumns, kept: BoolArray, *, arrays: Iterable[str] = (), lists: Iterable[str] = ()
) -> CsvColumns:
    """Some of the rows, with these columns; those that may hold None are named in `lists`."""
    columns: dict[str, NDArray[Any] | list[Any]] = {name: rows[name][kept] for name in arrays}
    columns |= {name: list(compress(rows.list(name), kept)) for name in lists}
    return CsvColumns(rows.numbers[kept], columns)


def gathered(
    batches: Iterable[CsvColumns], *, arrays: Iterable[str] = (), lists: Iterable[str] = ()
) -> CsvColumns:
    """All batches as one, `arrays` as whole numbers; columns that may hold None are named in `lists`."""
    pieces = list(batches)
    columns: dict[str, NDArray[Any] | list[Any]] = {
        name: _joined([p[name] for p in pieces]) for name in arrays
    }
    columns |= {name: list(chain.from_iterable(p.list(name) for p in pieces)) for name in lists}
    return CsvColumns(_joined([piece.numbers for piece in pieces]), columns)


def _joined(arrays: list[NDArray[Any]]) -> IntArray:
    return np.concatenate([np.empty(0, dtype=np.int64), *(a.astype(np.int64) for a in arrays)])


@dataclass(frozen=True)
class Turns:
    """Which rows of sessions follow which; shape [rows] each."""

    place: IntArray
    """0-based place in its session."""
    previous: IntArray
    """The row of the turn before; -1 for a first turn."""
    first: IntArray
    """The row of the first turn of its session."""

    @property
    def begins(self) -> BoolArray:
        """Which rows are first turns."""
        return self.previous < 0


def turns_of(sessions: Sequence[str], order: IntArray) -> Turns:
    """The turns of each session by `order`, equal ones as they stand. Shape [rows] each."""
    codes: dict[str, int] = {}
    session = np.array([codes.setdefault(name, len(codes)) for name in sessions], dtype=np.int64)
    rows = np.lexsort((order, session))
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = session[rows[1:]] != session[rows[:-1]]
    places = np.arange(len(rows))
    start = np.maximum.accumulate(np.where(begins, places, 0))
    turns = Turns(*(np.empty(len(rows), dtype=np.int64) for _ in range(3)))
    turns.place[rows] = places - start
    turns.previous[rows] = np.where(begins, -1, np.roll(rows, 1))
    turns.first[rows] = rows[start]
    return turns
