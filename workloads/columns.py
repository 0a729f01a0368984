"""Many requests as Arrow columns: tens of bytes each, made into a RequestSpec when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.spec import RequestSpec, WorkloadError

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 4096
"""Rows made into requests at once."""

_TYPES = {
    "request_id": "string",
    "arrival_s": "float64",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "prompt_token_ids": "token ids",
    "output_token_ids": "token ids",
    "priority": "int64",
    "session_id": "string",
    "turn": "int64",
    "think_time_s": "float64",
    "context_tokens": "int64",
    "prefix_ids": "ids",
    "prefix_block_tokens": "int64",
    "min_tokens": "int64",
    "stop_token_ids": "token ids",
    "ignore_eos": "bool_",
    "abort_s": "float64",
    "client_id": "string",
    "cache_salt": "string",
    "predicted_output_tokens": "int64",
    "source_row": "int64",
}
_DEFAULTS = {f.name: f.default for f in fields(RequestSpec) if f.default is not MISSING}
_LISTS = frozenset(name for name, kind in _TYPES.items() if kind in ("ids", "token ids"))
REQUEST_FIELDS = tuple(_TYPES)
ROW_ID = "row-{:06d}"
"""The id of a request whose source names none."""


class RequestColumns(Sequence[RequestSpec]):
    """Requests in a fixed order. A column that is absent holds the default of RequestSpec throughout.

    Without a column `request_id` the requests are named after their source row.
    """

    def __init__(self, table: pa.Table) -> None:
        """`table`: columns named and typed as `column_array` makes them."""
        unknown = set(table.column_names) - _TYPES.keys()
        if unknown:
            raise WorkloadError(f"column {min(unknown)!r}: must be one of {', '.join(_TYPES)}")
        self.table = table

    @classmethod
    def of(cls, requests: Sequence[RequestSpec]) -> Self:
        """The same requests in columns."""
        import pyarrow as pa

        columns: dict[str, pa.Array] = {}
        for name in _TYPES:
            values = [getattr(r, name) for r in requests]
            if name not in _DEFAULTS or any(v != _DEFAULTS[name] for v in values):
                columns[name] = column_array(name, values)
        return cls(pa.table(columns))

    # ------------------------------------------------------------ columns

    @property
    def arrival_s(self) -> NDArray[np.float64]:
        """Send times in seconds, shape [n]."""
        return self._numbers("arrival_s").astype(np.float64)

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Shape [n]."""
        return self._numbers("prompt_tokens").astype(np.int64)

    @property
    def output_tokens(self) -> NDArray[np.int64]:
        """Shape [n]."""
        return self._numbers("output_tokens").astype(np.int64)

    def has(self, name: str) -> bool:
        """Whether some request has a value there."""
        return name in self.table.column_names and self.table[name].null_count < len(self)

    def values(self, name: str) -> list[Any]:
        """One value for each request, as a RequestSpec holds it."""
        if name == "request_id" and name not in self.table.column_names:
            return [ROW_ID.format(row) for row in self.values("source_row")]
        if name not in self.table.column_names:
            return [_DEFAULTS[name]] * len(self)
        return _python_values(name, self.table[name].to_pylist())

    def _numbers(self, name: str) -> NDArray[Any]:
        numbers: NDArray[Any] = self.table[name].to_numpy()
        return numbers

    # ------------------------------------------------------------ rearranging

    def take(self, indices: NDArray[np.int64]) -> Self:
        """The requests at these places, in this order."""
        return type(self)(self.table.take(indices))

    def with_column(self, name: str, values: Sequence[Any] | NDArray[Any]) -> Self:
        """The same with one column replaced or added."""
        column = column_array(name, values)
        if name in self.table.column_names:
            place = self.table.column_names.index(name)
            return type(self)(self.table.set_column(place, name, column))
        return type(self)(self.table.append_column(name, column))

    def in_order_of_arrival(self) -> Self:
        """Sorted by `arrival_s`; ties keep their order."""
        times = self.arrival_s
        if (times[1:] >= times[:-1]).all():
            return self
        return self.take(np.argsort(times, kind="stable"))

    # ------------------------------------------------------------ a sequence

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[RequestSpec]:
        for start in range(0, len(self), CHUNK_ROWS):
            yield from _requests(self.table.slice(start, CHUNK_ROWS))

    @overload
    def __getitem__(self, index: int) -> RequestSpec: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> RequestSpec | Self:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return type(self)(self.table.slice(start, max(stop - start, 0)))
            return self.take(np.arange(start, stop, step))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return next(_requests(self.table.slice(index % len(self), 1)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]


def values_of(requests: Sequence[RequestSpec], name: str) -> list[Any]:
    """One field of every request, without making requests of columns."""
    return (
        requests.values(name)
        if isinstance(requests, RequestColumns)
        else [getattr(r, name) for r in requests]
    )


def known_prompts(requests: Sequence[RequestSpec]) -> int:
    """How many requests say what their prompt begins with: its tokens, prefix ids, or the context of a session."""
    names = ("prompt_token_ids", "prefix_ids", "context_tokens")
    if not isinstance(requests, RequestColumns):
        return sum(any(getattr(r, name) is not None for name in names) for r in requests)
    known = np.zeros(len(requests), dtype=bool)
    for name in names:
        if name in requests.table.column_names:
            known |= requests.table[name].is_valid().to_numpy()
    return int(known.sum())


def column_array(name: str, values: Sequence[Any] | NDArray[Any]) -> pa.Array:
    """One value per request (None: the default) as the Arrow array of column `name`.

    Ids of prefixes are 64-bit numbers where they fit, else texts: they stay whole however large they are.
    """
    import pyarrow as pa

    kind = _TYPES[name]
    if kind == "token ids":
        return pa.array(values, type=pa.list_(pa.int32()))
    if kind != "ids":
        return pa.array(values, type=getattr(pa, kind)())
    for type_ in (pa.int64(), pa.uint64()):
        try:
            return pa.array(values, type=pa.list_(type_))
        except (OverflowError, pa.ArrowInvalid):
            continue
    texts = [None if ids is None else list(map(str, ids)) for ids in values]
    return pa.array(texts, type=pa.list_(pa.string()))


def concatenated(columns: Sequence[Mapping[str, pa.Array]]) -> pa.Table:
    """Pieces below one another, a column that a piece lacks being null there."""
    import pyarrow as pa

    tables = [pa.table(dict(piece)) for piece in columns]
    id_types = {t["prefix_ids"].type for t in tables if "prefix_ids" in t.column_names}
    if len(id_types) > 1:
        tables = [_with_ids_as_texts(t) for t in tables]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})


def _with_ids_as_texts(table: pa.Table) -> pa.Table:
    import pyarrow as pa

    if "prefix_ids" not in table.column_names:
        return table
    place = table.column_names.index("prefix_ids")
    return table.set_column(place, "prefix_ids", table["prefix_ids"].cast(pa.list_(pa.string())))


def _python_values(name: str, values: list[Any]) -> list[Any]:
    default = _DEFAULTS.get(name)
    if name == "prefix_ids":
        return [default if v is None else tuple(map(int, v)) for v in values]
    if name in _LISTS:
        return [default if v is None else tuple(v) for v in values]
    return values if default is None else [default if v is None else v for v in values]


def _requests(table: pa.Table) -> Iterator[RequestSpec]:
    columns = RequestColumns(table)
    names = [n for n in _TYPES if n in table.column_names or n == "request_id"]
    for row in zip(*(columns.values(name) for name in names), strict=True):
        yield RequestSpec(**dict(zip(names, row, strict=True)))
