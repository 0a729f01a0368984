"""More kinds of csv cells, made from those of csv_rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.traces.csv_rows import Kind
from servetwin.workloads.traces.values import Damage

if TYPE_CHECKING:
    import pyarrow as pa

_SIGNED = "[+-]?[0-9]{1,18}"


def optional(kind: Kind) -> Kind:
    """Cells of another kind, or None where they are empty. Read with `CsvColumns.list`."""

    def one(name: str, cell: str) -> Any:
        return kind.one(name, cell) if cell.strip() else None

    def many(cells: pa.StringArray) -> list[Any] | None:
        import pyarrow.compute as pc

        there = pc.not_equal(pc.utf8_trim_whitespace(cells), "")
        found: list[Any] = [None] * len(cells)
        filled = cells.filter(there)
        if not len(filled):
            return found
        values = kind.many(filled)
        if values is None:
            return None
        places = np.flatnonzero(there.to_numpy(zero_copy_only=False))
        for place, value in zip(places.tolist(), np.asarray(values).tolist(), strict=True):
            found[place] = value
        return found

    return Kind(one, many)


def _one_signed(name: str, cell: str) -> int:
    if not re.fullmatch(_SIGNED, cell.strip(), re.ASCII):
        raise Damage(name, cell, "a whole number of at most 18 digits")
    return int(cell)


def _many_signed(cells: pa.StringArray) -> NDArray[np.int64] | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.match_substring_regex(cells, "^-?[0-9]{1,18}$")).as_py():
        return None
    numbers: NDArray[np.int64] = cells.cast(pa.int64()).to_numpy()
    return numbers


SIGNED = Kind(_one_signed, _many_signed)
"""A whole number, also a negative one: a priority."""
