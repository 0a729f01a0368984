"""The table of steps while a run goes on and in its parts: one row per step, or per run of like steps.

A run of plain decodes differs from step to step by its clock, by the length of its contexts and by the blocks that
some rows begin; so it is one row with a number of repeats and what changes. `expanded` makes single steps of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from servetwin.sim.columns import (
    CHUNK_ROWS,
    NEVER,
    REPLICA,
    SCHEMAS,
    PackedInts,
    arrow_schema,
    int_array,
    replica_array,
)
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]

NOT_STORED = ("source", "predicted_s", REPLICA)
"""Columns of steps that are no integers of their own."""
INTEGERS = tuple(name for name in SCHEMAS["steps"] if name not in NOT_STORED)
RUN_INTEGERS = ("repeats", "device_growth_ns", "regular_gaps", "overlaps")
"""`repeats`: steps of this row. `device_growth_ns`: by which device time grows from one to the next, where no list says
each. `regular_gaps`: rows (of each step) whose last token before came with the step in front of it. `overlaps`: 1 where
each step is scheduled when the device begins with the one in front of it, 0 where that is over by then."""
EXACT_TIMES = {f"{name}_s": f"{name}_ns" for name in ("start", "prepare_start", "device_start", "end")}
"""Instants stand in a part in whole ns, too: far from 0 a float of seconds is not exact."""
TIME_LISTS = (
    "each_start_ns",
    "each_prepare_start_ns",
    "each_device_start_ns",
    "each_device_ns",
    "each_end_ns",
)
LISTS = ("blocks_begun_at", "evictions_at", *TIME_LISTS)
"""Steps of the row (1, 2, ...: the row's own figures are those of its first) in which a block is begun, and in which a
cached content is evicted, once for each. The times of every step where they do not follow from the first one's: those
on the device, or all of them (steps in flight overlap)."""
WIDTH = len(INTEGERS) + len(RUN_INTEGERS)
DECODES = (
    "start_s",
    "device_start_s",
    "device_s",
    "rows",
    "running",
    "waiting",
    "used_blocks",
    "cached_free_blocks",
    "free_blocks",
    "evictions",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preempted_query_tokens",
    "preempted_hit_tokens",
    "decode_context_tokens",
    "decode_context_max_tokens",
    "repeats",
    "device_growth_ns",
)
"""What a row of decodes alone has to say where the host takes no time, and nothing else: the rest follows."""
_FOLLOWING = {
    "start_s": ("prepare_start_s",),
    "rows": ("decode_tokens", "decode_rows", "logits_rows", "regular_gaps"),
}


DECODE_LISTS = ("blocks_begun_at", "evictions_at", "each_device_ns")
"""Behind them, of LISTS."""
Row = tuple[Any, ...]
"""INTEGERS (ns where the table has seconds, NEVER for null), then RUN_INTEGERS, and where there are any LISTS; or
DECODES, then DECODE_LISTS."""


class StepRows:
    """Steps of one replica that are not written yet, packed like the rows of other tables (`sim/columns.py`)."""

    def __init__(self, replica: int = 0) -> None:
        self._replica = replica
        self._rows: list[Row] = []
        self._chunks: list[list[PackedInts]] = []
        self._sources: list[str] = []
        self._lists = {name: array("q" if name in TIME_LISTS else "i") for name in LISTS}
        self._list_rows = {name: array("i") for name in LISTS}

    def append(self, source: str, row: Row) -> None:
        self._sources.append(source)
        self._rows.append(row)
        if len(self._rows) == CHUNK_ROWS:
            self._pack()

    def _pack(self) -> None:
        numbered = [*enumerate(self._rows, len(self._sources) - len(self._rows))]
        decodes = [(i, row[len(DECODES) :]) for i, row in numbered if len(row) < WIDTH]
        others = [(i, row[WIDTH:]) for i, row in numbered if len(row) > WIDTH]
        for place, name in enumerate(LISTS):
            found = [(i, lists[place]) for i, lists in others if lists[place]]
            if name in DECODE_LISTS:
                place = DECODE_LISTS.index(name)
                found += [(i, lists[place]) for i, lists in decodes if lists[place]]
            found.sort(key=itemgetter(0))
            self._lists[name].extend(chain.from_iterable(items for _, items in found))
            self._list_rows[name].extend(chain.from_iterable((i, len(items)) for i, items in found))
        self._chunks.append(_packed(self._rows))
        self._rows = []

    def __len__(self) -> int:
        return len(self._sources)

    def to_arrow(self) -> pa.Table:
        """The rows as they stand in a part."""
        import numpy as np
        import pyarrow as pa

        self._pack()
        chunks = self._chunks
        arrays = {
            name: int_array(
                np.concatenate([chunk[i].whole() for chunk in chunks]), SCHEMAS["steps"].get(name, "count")
            )
            for i, name in enumerate((*INTEGERS, *RUN_INTEGERS))
        }
        for i, name in enumerate(INTEGERS):
            if name in EXACT_TIMES:
                arrays[EXACT_TIMES[name]] = pa.array(np.concatenate([chunk[i].whole() for chunk in chunks]))
        arrays["source"] = pa.array(self._sources, pa.string())
        arrays[REPLICA] = replica_array(self._replica, len(self))
        arrays["predicted_s"] = pa.nulls(len(self), pa.float64())
        for name, items in self._lists.items():
            rows, lengths = np.array(self._list_rows[name], dtype=np.int64).reshape(-1, 2).T
            ends = np.zeros(len(self) + 1, dtype=np.int32)
            ends[rows + 1] = lengths
            arrays[name] = pa.ListArray.from_arrays(
                pa.array(np.cumsum(ends, dtype=np.int32)), pa.array(np.array(items, dtype=np.int64))
            )
        schema = part_schema()
        return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


def _packed(rows: Sequence[Row]) -> list[PackedInts]:
    """Column by column."""
    import numpy as np

    width = len(DECODES)
    values = np.empty((len(rows), WIDTH), np.int64)
    whole = np.array([*map(len, rows)], np.int64) >= WIDTH
    values[whole] = _matrix([row[:WIDTH] for row in rows if len(row) >= WIDTH], WIDTH)
    values[~whole] = _whole_rows(_matrix([row[:width] for row in rows if len(row) < WIDTH], width))
    return PackedInts.of_each(np.ascontiguousarray(values.T))


def first_of(row: Row, num_steps: int) -> Row:
    """A row of decodes alone (DECODES and DECODE_LISTS) with no more than so many of its steps."""
    begun_at, evictions_at, each_ns = row[len(DECODES) :]
    shorter = dict(zip(DECODES, row, strict=False)) | {"repeats": num_steps}
    return (
        *(shorter[name] for name in DECODES),
        [i for i in begun_at if i < num_steps],
        [i for i in evictions_at if i < num_steps],
        each_ns[:num_steps],
    )


def last_of(row: Row) -> dict[str, Any]:
    """What a row as `StepRows.append` wants it says of its last step, by name, where that overlaps with its others."""
    names = (*INTEGERS, *RUN_INTEGERS) if len(row) >= WIDTH else (*DECODES, *DECODE_LISTS)
    said: dict[str, Any] = dict(zip(names, row, strict=False))
    before = said["repeats"] - 1
    if not before:
        return said
    first_ns, growth_ns, each_ns = said["device_s"], said["device_growth_ns"], said["each_device_ns"]
    durations = each_ns or [first_ns + growth_ns * i for i in range(before + 1)]
    said["start_s"] = said["device_start_s"] + sum(durations[: before - 1])
    said["device_start_s"] = said["start_s"] + durations[before - 1]
    said["device_s"] = durations[before]
    begun, evicted = len(said["blocks_begun_at"]), len(said["evictions_at"])
    said["used_blocks"] += begun
    said["cached_free_blocks"] -= evicted
    said["free_blocks"] -= begun - evicted
    said["evictions"] = said["evictions_at"].count(before)
    said["decode_context_tokens"] += said["rows"] * before
    said["decode_context_max_tokens"] += before
    return said


def _matrix(rows: Sequence[Row], width: int) -> NDArray[np.int64]:
    """[rows, width], by way of bytes: numpy looks at tuples much longer."""
    import numpy as np

    pack = Struct(f"{width}q").pack
    return np.frombuffer(b"".join([pack(*row) for row in rows]), np.int64).reshape(-1, width)


def _whole_rows(decodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n, WIDTH] from DECODES, [n, 18]."""
    import numpy as np

    values = np.zeros((len(decodes), WIDTH), np.int64)
    places = {name: i for i, name in enumerate((*INTEGERS, *RUN_INTEGERS))}
    for name, column in zip(DECODES, decodes.T, strict=True):
        for same in (name, *_FOLLOWING.get(name, ())):
            values[:, places[same]] = column
    device_start_ns = values[:, places["device_start_s"]]
    values[:, places["end_s"]] = device_start_ns + values[:, places["device_s"]]
    values[:, places["overlaps"]] = device_start_ns > values[:, places["start_s"]]
    values[:, places["graph_tokens"]] = NEVER
    return values


def part_schema() -> pa.Schema:
    """Of a part of steps: the table's columns, and those that make one row many."""
    import pyarrow as pa

    schema = arrow_schema(SCHEMAS["steps"])
    for name in (*RUN_INTEGERS, *EXACT_TIMES.values()):
        schema = schema.append(pa.field(name, pa.int64()))
    for name in LISTS:
        schema = schema.append(pa.field(name, pa.list_(pa.int64())))
    return schema


def expanded(part: pa.Table, names: Sequence[str] | None = None) -> pa.Table:
    """One row for each step, with the columns `names` of the table (all by default)."""
    names = list(SCHEMAS["steps"]) if names is None else list(names)
    if "repeats" not in part.column_names or part["repeats"].null_count == len(part):
        return part.select(names)
    return _Expansion(part).table(names)


STEPS_AT_ONCE = 200_000
"""Of a piece, or those of one row."""


def in_pieces(part: pa.Table) -> Iterator[pa.Table]:
    """Rows of a part one after the other, of so many steps at once that these need little space."""
    import numpy as np

    piece = np.cumsum(_integers(part, "repeats", 1)) // STEPS_AT_ONCE
    begins = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(part)]
    for begin, end in pairwise(begins):
        yield part.slice(begin, end - begin)


FOR_GAPS = (
    "end_s", "end_ns", "start_s", "start_ns", "device_s",
    "repeats", "device_growth_ns", "regular_gaps", "overlaps", *TIME_LISTS, REPLICA,
)  # fmt: skip
"""Columns of a part that `regular_gaps` needs."""


def regular_gaps(part: pa.Table) -> tuple[Int64s, Int64s]:
    """Of every step: its end in ns, and how many rows had their last token before with the step in front of it."""
    import numpy as np

    ends = _Expansion(part).ns("end_s")
    return ends, np.repeat(_integers(part, "regular_gaps"), _integers(part, "repeats", 1))


class StepFigures(NamedTuple):
    """What can be said of the steps of a part without making them one by one."""

    totals: dict[str, int]
    """Sums of the columns SUMMED."""
    num_steps: int
    """Steps with tokens."""
    num_leapt: int
    """Steps of rows that are more than one."""
    busy_ns: int
    """The sum of prepare_s + device_s."""
    peak_used_fraction: float | None
    """Largest share of usable blocks in use; None where no step knows its blocks."""
    busy_ns_of: Mapping[int, int] = {}
    """`busy_ns` by replica, where several parts were added up."""


SUMMED = (
    "prefill_tokens",
    "decode_tokens",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preempted_query_tokens",
    "preempted_hit_tokens",
    "evictions",
    "predicted_outside",
    "draft_rows",
    "draft_tokens",
    "accepted_draft_tokens",
)


FOR_FIGURES = (
    *SUMMED, "used_blocks", "cached_free_blocks", "free_blocks", "rows", "prepare_s", "device_s",
    "repeats", "device_growth_ns", "blocks_begun_at", "evictions_at", "each_device_ns", REPLICA,
)  # fmt: skip
"""Columns of a part that `figures` needs."""


def figures(part: pa.Table) -> StepFigures:
    """Of all steps of a part."""
    import numpy as np

    repeats = _integers(part, "repeats", 1)
    totals = {name: int((_integers(part, name) * repeats).sum()) for name in SUMMED}
    # What a row says of evictions is of its first step alone; blocks in use only grow within a row.
    totals["evictions"] = int(_integers(part, "evictions").sum()) + int(_lengths(part, "evictions_at").sum())
    used = _integers(part, "used_blocks")
    usable = used + _integers(part, "cached_free_blocks") + _integers(part, "free_blocks")
    known = usable > 0
    peak = (used + _lengths(part, "blocks_begun_at"))[known] / usable[known]
    return StepFigures(
        totals,
        int(repeats[_integers(part, "rows") > 0].sum()),
        int(repeats[repeats > 1].sum()),
        int((_ns(part, "prepare_s") * repeats).sum() + _device_ns(part, repeats).sum()),
        float(np.max(peak)) if len(peak) else None,
    )


def _device_ns(part: pa.Table, repeats: Int64s) -> Int64s:
    """Of each row, all of its steps together."""
    import numpy as np

    total = _ns(part, "device_s") * repeats
    total += _integers(part, "device_growth_ns") * (repeats * (repeats - 1) // 2)
    lengths = _lengths(part, "each_device_ns")
    if lengths.any():
        sums = np.add.reduceat(_items(part, "each_device_ns"), (np.cumsum(lengths) - lengths)[lengths > 0])
        total[lengths > 0] = sums
    return total


def _integers(part: pa.Table, name: str, otherwise: int = 0) -> Int64s:
    """A column of whole numbers; `otherwise` for nulls, and where an older part has no such column."""
    import numpy as np

    if name not in part.column_names:
        return np.full(len(part), otherwise, dtype=np.int64)
    values: Int64s = part[name].fill_null(otherwise).to_numpy().astype(np.int64)
    return values


def _ns(part: pa.Table, name: str) -> Int64s:
    """A column of times in ns, NEVER for null."""
    import numpy as np

    exact = EXACT_TIMES.get(name, "")
    if exact in part.column_names and not part[exact].null_count:
        return _integers(part, exact)
    seconds = part[name].to_numpy()
    ns: Int64s = np.where(np.isnan(seconds), NEVER, np.rint(np.nan_to_num(seconds) * NS_PER_S)).astype(
        np.int64
    )
    return ns


def _lengths(part: pa.Table, name: str) -> Int64s:
    """How many items each row's list has."""
    import numpy as np

    if name not in part.column_names:
        return np.zeros(len(part), dtype=np.int64)
    lengths: Int64s = part[name].combine_chunks().value_lengths().fill_null(0).to_numpy().astype(np.int64)
    return lengths


def _items(part: pa.Table, name: str) -> Int64s:
    """The items of all rows' lists."""
    items: Int64s = part[name].combine_chunks().flatten().to_numpy()
    return items


class _Expansion:
    """The steps of one part, column by column."""

    def __init__(self, part: pa.Table) -> None:
        import numpy as np

        self._part = part
        repeats = _integers(part, "repeats", 1)
        self._first = np.cumsum(repeats) - repeats
        self._row = np.repeat(np.arange(len(part)), repeats)
        self._offset: Int64s = np.arange(int(repeats.sum())) - self._first[self._row]
        self._cache: dict[str, Int64s] = {}

    def table(self, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        schema = arrow_schema({name: SCHEMAS["steps"][name] for name in names})
        return pa.Table.from_arrays([self._column(name) for name in names], schema=schema)

    def ns(self, name: str) -> Int64s:
        """A column of times that change from step to step, in ns."""
        times: Int64s = self._ns(name)[self._row] + getattr(self, f"_change_of_{name}")()
        return times

    def _column(self, name: str) -> pa.Array:
        import pyarrow as pa

        change = getattr(self, f"_change_of_{name}", None)
        if change is None:
            return self._part[name].combine_chunks().take(pa.array(self._row))
        if SCHEMAS["steps"][name] == "time":
            return pa.array(self.ns(name) / NS_PER_S, mask=self._ns(name)[self._row] == NEVER)
        column = self._part[name]
        stored = _integers(self._part, name)[self._row]
        missing = column.is_null().to_numpy()[self._row] if column.null_count else None
        return pa.array(stored + change(), mask=missing)

    def _ns(self, name: str) -> Int64s:
        if name not in self._cache:
            self._cache[name] = _ns(self._part, name)
        return self._cache[name]

    def _each(self, name: str, changes: Int64s, first: Int64s) -> Int64s:
        """The changes that follow from the first step, and where a list says each of them those."""
        import numpy as np

        lengths = _lengths(self._part, name)
        if lengths.any():
            given = lengths > 0
            changes = changes.copy()
            changes[given[self._row]] = _items(self._part, name) - np.repeat(first[given], lengths[given])
        return changes

    def _change_of_device_s(self) -> Int64s:
        """Of a step against the first of its row, in ns."""
        if "device" not in self._cache:
            growth = _integers(self._part, "device_growth_ns")
            even = growth[self._row] * self._offset
            self._cache["device"] = self._each("each_device_ns", even, self._ns("device_s"))
        return self._cache["device"]

    def _behind_each_other(self) -> Int64s:
        """By how much the device begins later than with the first step of its row, where no list says it."""
        import numpy as np

        if "behind" not in self._cache:
            # Each begins when the one before has ended; on the device alone where they overlap.
            first = np.where(self._overlaps, self._ns("device_s"), self._ns("end_s") - self._ns("start_s"))
            whole = first[self._row] + self._change_of_device_s()
            before = np.cumsum(whole) - whole
            self._cache["behind"] = before - before[self._first][self._row]
        return self._cache["behind"]

    @property
    def _overlaps(self) -> NDArray[np.bool_]:
        """Of each row."""
        overlaps: NDArray[np.bool_] = _integers(self._part, "overlaps") > 0
        return overlaps

    def _scheduled_later(self) -> Int64s:
        """By how much a step is scheduled later than the first of its row."""
        import numpy as np

        later = self._behind_each_other()
        if not self._overlaps.any():
            return later
        waits = (self._ns("device_start_s") - self._ns("start_s"))[self._row]
        with_the_one_before = np.where(self._offset > 0, waits + np.roll(later, 1), 0)
        return np.where(self._overlaps[self._row], with_the_one_before, later)

    def _change_of_start_s(self) -> Int64s:
        return self._each("each_start_ns", self._scheduled_later(), self._ns("start_s"))

    def _change_of_prepare_start_s(self) -> Int64s:
        return self._each("each_prepare_start_ns", self._scheduled_later(), self._ns("prepare_start_s"))

    def _change_of_device_start_s(self) -> Int64s:
        return self._each("each_device_start_ns", self._behind_each_other(), self._ns("device_start_s"))

    def _change_of_end_s(self) -> Int64s:
        after = self._behind_each_other() + self._change_of_device_s()
        return self._each("each_end_ns", after, self._ns("end_s"))

    def _change_of_decode_context_tokens(self) -> Int64s:
        grown: Int64s = _integers(self._part, "decode_rows")[self._row] * self._offset
        return grown

    def _change_of_decode_context_max_tokens(self) -> Int64s:
        return self._offset

    def _counted(self, name: str) -> Int64s:
        """How often a step of its row is named in a list."""
        import numpy as np

        if name not in self._cache:
            places = np.repeat(self._first, _lengths(self._part, name)) + _items(self._part, name)
            self._cache[name] = np.bincount(places, minlength=len(self._row))
        return self._cache[name]

    def _since_first(self, name: str) -> Int64s:
        """The same, added up from the first step of the row."""
        import numpy as np

        total = np.cumsum(self._counted(name))
        before = (total - self._counted(name))[self._first]
        since: Int64s = total - before[self._row]
        return since

    def _change_of_evictions(self) -> Int64s:
        import numpy as np

        first = _integers(self._part, "evictions")[self._row]
        change: Int64s = np.where(self._offset > 0, self._counted("evictions_at") - first, 0)
        return change

    def _change_of_used_blocks(self) -> Int64s:
        return self._since_first("blocks_begun_at")

    def _change_of_cached_free_blocks(self) -> Int64s:
        return -self._since_first("evictions_at")

    def _change_of_free_blocks(self) -> Int64s:
        return self._since_first("evictions_at") - self._since_first("blocks_begun_at")
