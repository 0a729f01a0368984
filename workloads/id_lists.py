"""The prefix ids of many requests as one array of numbers, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from servetwin.workloads.columns import RequestColumns

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class IdLists:
    """Shapes: `codes` and `rows` [ids of all requests together], in the order of the requests."""

    codes: Ints
    """A number below `distinct` for each id: equal ids, equal numbers."""
    rows: Ints
    """The request that each belongs to."""
    distinct: int


def id_lists(requests: RequestColumns) -> IdLists:
    """The ids of requests that have some."""
    import pyarrow.compute as pc

    column = requests.table["prefix_ids"]
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    flat = pc.list_flatten(column).combine_chunks().dictionary_encode()
    rows = np.repeat(np.arange(len(requests)), lengths)
    return IdLists(flat.indices.to_numpy().astype(np.int64), rows, len(flat.dictionary))


def with_ids(requests: RequestColumns, ids: Ints) -> RequestColumns:
    """The same requests with other ids: `ids` in the place of the `codes` of their IdLists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = requests.table["prefix_ids"]
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    absent = pa.array(pc.is_null(column).to_numpy())
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids, type=pa.int64()), mask=absent)
    place = requests.table.column_names.index("prefix_ids")
    return RequestColumns(requests.table.set_column(place, "prefix_ids", lists))
