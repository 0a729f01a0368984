"""The tables of the event log: their columns, and their buffers while a run goes on.

A buffer holds integer nanoseconds; they become seconds (one division) when a part is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Union

from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

NEVER = -1
"""In a column of times: it has not happened. Neither times nor counts are ever negative; a part says null."""

COMPLETED = ("length", "stop")
"""Finish reasons of a request that got its whole answer."""

Kind = Literal["time", "count", "count or null", "text", "seconds"]
"""time: integer ns in the buffer, seconds in a part; count: an integer; count or null: an integer or NEVER; text: a
string or None; seconds: a float or None that was never on the clock."""

SCHEMAS: dict[str, dict[str, Kind]] = {
    "requests": {
        "request_id": "text",
        "num_prompt_tokens": "count",
        "num_output_tokens": "count",
        "arrival_s": "time",
        "queued_s": "time",
        "first_scheduled_s": "time",
        "first_token_s": "time",
        "last_token_s": "time",
        "finish_s": "time",
        "preemptions": "count",
        "cached_tokens": "count",
        "recomputed_tokens": "count",
        "finish_reason": "text",
        "priority": "count",
        "session_id": "text",
        "client_id": "text",
        "sent_s": "time",
        "replica": "count or null",
    },
    "steps": {
        "start_s": "time",
        "prepare_s": "time",
        "device_s": "time",
        "host_s": "time",
        "source": "text",
        "predicted_s": "seconds",
        "prefill_tokens": "count",
        "decode_tokens": "count",
        "rows": "count",
        "decode_rows": "count",
        "running": "count",
        "waiting": "count",
        "used_blocks": "count",
        "cached_free_blocks": "count",
        "free_blocks": "count",
        "preemptions": "count",
        "evictions": "count",
        "prefix_query_tokens": "count",
        "prefix_hit_tokens": "count",
        "preempted_query_tokens": "count",
        "preempted_hit_tokens": "count",
        "recomputed_tokens": "count",
        "draft_rows": "count",
        "draft_tokens": "count",
        "accepted_draft_tokens": "count",
        "schedule_s": "time",
        "prepare_start_s": "time",
        "device_start_s": "time",
        "end_s": "time",
        "graph_tokens": "count or null",
        "predicted_outside": "count or null",
        "logits_rows": "count or null",
        "decode_context_tokens": "count or null",
        "decode_context_max_tokens": "count or null",
        "prefill_rows": "count or null",
        "prefill_pairs": "count or null",
        "prefill_context_tokens": "count or null",
        "largest_chunk_tokens": "count or null",
        "largest_chunk_context_tokens": "count or null",
        "new_requests": "count or null",
        "replica": "count or null",
    },
    "events": {
        "time_s": "time",
        "request_id": "text",
        "kind": "text",
        "reason": "text",
        "until_s": "time",
        "computed_tokens": "count",
        "blocks": "count",
        "replica": "count or null",
    },
    "blocks": {
        "block_id": "count",
        "request_id": "text",
        "prefix_id": "text",
        "from_s": "time",
        "to_s": "time",
        "ended": "text",
        "peak_references": "count",
        "released_s": "time",
        "shared": "count or null",
        "replica": "count or null",
    },
    "itl": {"time_s": "time", "gap_s": "time", "samples": "count"},
    "tokens": {
        "request_id": "text",
        "index": "count",
        "token_id": "count",
        "time_s": "time",
        "replica": "count or null",
    },
}
"""`itl` holds the gaps between the outputs of requests that completed, pooled: `samples` gaps of `gap_s` ended at
`time_s`. Of `blocks`: `released_s` is when its last request let it go (null: while it is held, or nobody did), `shared`
how many requests took it beside others that held it. `replica`: the engine that it happened in, 0 in a run with one;
null: at the door, before any."""

STORED_GAPS: dict[str, Kind] = {**SCHEMAS["itl"], "from_step": "count or null", "to_step": "count or null"}
STORED_GAPS |= {"request_id": "text", "replica": "count or null"}
"""`itl` as its parts have it: only gaps over more than one step stand there with their times, the others follow from
the steps (`step_rows.regular_gaps`). Negative `samples` take back those of a request that did not complete (aborted, or
open at the end): one gap, or one for each step from `from_step + 1` to `to_step` (rows of the replica's steps).
`request_id`: whose they are (null in older runs)."""

SHAPE_COLUMNS = (
    "logits_rows",
    "decode_context_tokens",
    "decode_context_max_tokens",
    "prefill_rows",
    "prefill_pairs",
    "prefill_context_tokens",
    "largest_chunk_tokens",
    "largest_chunk_context_tokens",
    "new_requests",
)
"""What the duration of a step depends on besides its tokens and rows (`contract.StepShape`)."""

REPLICA = "replica"
LATER_COLUMNS = frozenset(
    ["graph_tokens", "sent_s", "predicted_outside", "released_s", "shared", REPLICA, *SHAPE_COLUMNS]
)
"""Columns that runs of this schema version may lack; they read as null then (the replica: as 0)."""

ORDER = {"requests": "arrival_s", "events": "time_s", "blocks": "from_s", "itl": "time_s"}
"""Rows are written when they are complete; a reader sorts them by this column, ties in order of writing."""

NOT_COMPARED = ("source", "predicted_", "wall_")
"""Columns whose names begin so say where a number came from; two equal logs may differ in them."""


PARTS: dict[str, dict[str, Kind]] = {"itl": STORED_GAPS}
"""Tables that a reader makes of more columns than it shows (steps: `sim/step_rows.py`)."""


class Part(Protocol):
    """Rows that can be written as one part of a table."""

    def to_arrow(self) -> pa.Table: ...


class Columns:
    """The rows of one table that are not written yet, all of one replica (None: of the door).

    They are packed column by column, a chunk at a time: a log in memory is as small as its numbers are.
    """

    def __init__(self, table: str, replica: int | None = 0) -> None:
        self._whole_schema = PARTS.get(table, SCHEMAS[table])
        self.schema = {name: kind for name, kind in self._whole_schema.items() if name != REPLICA}
        self._replica = replica
        self._rows: list[tuple[int | float | str | None, ...]] = []
        self._chunks: list[list[PackedColumn]] = []

    def append(self, *row: int | float | str | None) -> None:
        """One row, in the order of the schema without the replica: times in ns and counts (NEVER: null), texts."""
        self.add(row)

    def add(self, row: tuple[int | float | str | None, ...]) -> None:
        """The same."""
        self._rows.append(row)
        if len(self._rows) == CHUNK_ROWS:
            self._pack()

    def __len__(self) -> int:
        return CHUNK_ROWS * len(self._chunks) + len(self._rows)

    def _pack(self) -> None:
        columns = zip(*self._rows, strict=True)
        kinds = self.schema.values()
        self._chunks.append([_packed(column, kind) for column, kind in zip(columns, kinds, strict=True)])
        self._rows = []

    def to_arrow(self) -> pa.Table:
        """The rows as they stand in a part: times in seconds."""
        import pyarrow as pa

        chunks = [*self._chunks]
        if self._rows or not chunks:
            columns = zip(*self._rows, strict=True) if self._rows else [()] * len(self.schema)
            chunks.append([_packed(c, kind) for c, kind in zip(columns, self.schema.values(), strict=True)])
        arrays = [
            _arrow_array([chunk[i] for chunk in chunks], kind) for i, kind in enumerate(self.schema.values())
        ]
        if REPLICA in self._whole_schema:
            arrays.append(replica_array(self._replica, len(self)))
        return pa.Table.from_arrays(arrays, schema=arrow_schema(self._whole_schema))


def replica_array(replica: int | None, length: int) -> pa.Array:
    """The column that says which replica all rows of a part are from; None: null."""
    import pyarrow as pa

    return pa.nulls(length, pa.int64()) if replica is None else pa.repeat(pa.scalar(replica), length)


CHUNK_ROWS = 1024
INTEGER_KINDS = ("time", "count", "count or null")
_SMALLER_KINDS = tuple((f"int{bits}", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32))
"""Of whole numbers: name, least and greatest."""
_NULLS = (None,) * CHUNK_ROWS
"""Stands for every chunk of nothing else."""
PackedColumn = Union["PackedInts", Sequence[float | str | None]]


class PackedInts(NamedTuple):
    """Whole numbers in as few bytes as they need."""

    values: Int64s
    """Of some integer type; one value where all are equal."""
    length: int

    @classmethod
    def of(cls, values: Int64s) -> PackedInts:
        """From [n] numbers."""
        if not len(values):
            return cls(values, 0)
        return cls._between(values, int(values.min()), int(values.max()))

    @classmethod
    def of_each(cls, columns: NDArray[np.int64]) -> list[PackedInts]:
        """From [columns, n] numbers, all at once."""
        each: list[Int64s] = [*columns]
        if not each or not len(each[0]):
            return [cls(column, 0) for column in each]
        bounds = zip(columns.min(axis=1).tolist(), columns.max(axis=1).tolist(), strict=True)
        return [cls._between(column, low, high) for column, (low, high) in zip(each, bounds, strict=True)]

    @classmethod
    def _between(cls, values: Int64s, low: int, high: int) -> PackedInts:
        """From numbers whose least and greatest are these."""
        if low == high:
            return cls(values[:1].copy(), len(values))
        for kind, least, most in _SMALLER_KINDS:
            if least <= low and high <= most:
                return cls(values.astype(kind), len(values))
        return cls(values.copy(), len(values))

    def whole(self) -> Int64s:
        """All of them, as int64."""
        import numpy as np

        return np.broadcast_to(self.values, (self.length,)).astype(np.int64)


def _packed(column: Sequence[int | float | str | None], kind: Kind) -> PackedColumn:
    import numpy as np

    if kind in INTEGER_KINDS:
        return PackedInts.of(np.array(column, dtype=np.int64))
    return _NULLS if column == _NULLS else column


def _arrow_array(chunks: Sequence[PackedColumn], kind: Kind) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    if kind in INTEGER_KINDS:
        values = np.concatenate([chunk.whole() for chunk in chunks if isinstance(chunk, PackedInts)])
        return int_array(values, kind)
    return pa.array([value for chunk in chunks for value in chunk], type=_arrow_type(kind))


def int_array(values: Int64s, kind: Kind) -> pa.Array:
    """Whole numbers as they stand in a part: times in seconds, NEVER is null where there may be nulls."""
    import pyarrow as pa

    if kind == "time":
        return pa.array(values / NS_PER_S, mask=values == NEVER)
    return pa.array(values, mask=values == NEVER) if kind == "count or null" else pa.array(values)


def _arrow_type(kind: Kind) -> pa.DataType:
    import pyarrow as pa

    types = {"time": pa.float64(), "seconds": pa.float64(), "text": pa.string()}
    return types.get(kind, pa.int64())


def arrow_schema(schema: Mapping[str, Kind]) -> pa.Schema:
    """The Arrow schema of a part."""
    import pyarrow as pa

    return pa.schema([(name, _arrow_type(kind)) for name, kind in schema.items()])
