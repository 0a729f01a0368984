"""The tables of one run as a reader gets them.

Everything shown or summarised is computed from these frames, so a log in memory and one on disk take the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from servetwin.sim.columns import NEVER, NOT_COMPARED, ORDER, REPLICA, SCHEMAS, STORED_GAPS, arrow_schema
from servetwin.sim.step_rows import FOR_GAPS, expanded, in_pieces, regular_gaps
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


MANY_GAPS = 250_000
"""Different ones that are kept beside each other, at least, before they are joined."""


class Gaps(NamedTuple):
    """Gaps between outputs, pooled: arrays [n]."""

    time_ns: Int64s
    """When each ends."""
    length_ns: Int64s
    samples: Int64s
    """How many there are; below 0 where some are taken back."""


class Tables(ABC):
    """The tables of one run as pandas frames, each made when it is first asked for."""

    @abstractmethod
    def parts(self, table: str) -> Sequence[pa.Table]:
        """The complete parts of a table in order of writing; none when nothing was written yet."""

    def frame(self, table: str) -> pd.DataFrame:
        """All rows of a table, with the right columns and types also when there are none."""
        import pyarrow as pa

        if table == "itl":
            return self._gaps()
        # Each replica writes when it has enough, so the order among them is nobody's.
        parts = sorted(self.parts(table), key=replica_of)
        order = ORDER.get(table)
        if table == "steps":
            order = "start_s" if len({*map(replica_of, parts)}) > 1 else None
            parts = [expanded(part) for part in parts]
        frame: pd.DataFrame = pa.concat_tables(
            [arrow_schema(SCHEMAS[table]).empty_table(), *parts]
        ).to_pandas()
        if order is not None:
            frame = frame.sort_values(order, kind="stable", ignore_index=True)
        return frame

    def iter_parts(self, table: str) -> Iterator[pa.Table]:
        """The same one by one: a long run need not be in memory all at once."""
        yield from self.parts(table)

    def iter_columns(self, table: str, names: Sequence[str] | None) -> Iterator[pa.Table]:
        """The same with some columns only; None stands for all."""
        for part in self.iter_parts(table):
            yield part if names is None else part.select(names)

    @cached_property
    def request_figures(self) -> pd.DataFrame:
        """Numbers of requests and how they ended, in no order: what is summed up, without texts and in little space."""
        import pyarrow as pa

        kinds = SCHEMAS["requests"]
        names = [name for name, kind in kinds.items() if kind != "text" or name == "finish_reason"]
        empty = arrow_schema({name: kinds[name] for name in names}).empty_table()
        table = pa.concat_tables([empty, *self.iter_columns("requests", names)])
        frame: pd.DataFrame = table.to_pandas(
            categories=["finish_reason"], split_blocks=True, self_destruct=True
        )
        return frame

    def gap_parts(self) -> Iterator[Gaps]:
        """The pool of gaps between outputs of completed requests, part by part.

        First those over one step, which follow from the steps of each replica; then those that are stored one by one.
        """
        import numpy as np

        stored = self._stored_gaps()
        taken = stored[stored.from_step.notna()]
        taken_of = {
            replica: [rows[name].to_numpy(dtype=np.int64) for name in ("from_step", "to_step", "samples")]
            for replica, rows in taken.groupby(REPLICA)
        }
        nothing = [np.zeros(0, dtype=np.int64)] * 3
        seen: dict[int, tuple[int, int]] = {}
        for part in (piece for whole in self.iter_columns("steps", FOR_GAPS) for piece in in_pieces(whole)):
            ends, counts = regular_gaps(part)
            replica = replica_of(part)
            first, last, samples = taken_of.get(replica, nothing)
            begun, before = seen.get(replica, (0, 0))
            change = np.zeros(len(ends) + 1, dtype=np.int64)
            # Taken back in the steps after `first` up to `last`, as far as they are in this part.
            np.add.at(change, np.clip(first + 1 - begun, 0, len(ends)), samples)
            np.add.at(change, np.clip(last + 1 - begun, 0, len(ends)), -samples)
            counts = counts + np.cumsum(change)[:-1]
            some = counts != 0
            yield Gaps(ends[some], np.diff(ends, prepend=before)[some], counts[some])
            seen[replica] = begun + len(ends), int(ends[-1]) if len(ends) else before
        odd = stored[stored.from_step.isna()]
        yield Gaps(
            ns_array(odd.time_s).astype(np.int64),
            ns_array(odd.gap_s).astype(np.int64),
            odd.samples.to_numpy(dtype=np.int64),
        )

    @cached_property
    def gap_lengths(self) -> tuple[Int64s, Int64s]:
        """The different gaps in the pool in ns, in ascending order, and how often each stands there."""
        import numpy as np

        pool = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for part in self.gap_parts():
            pool.append(_joined([(part.length_ns, part.samples)]))
            if sum(len(lengths) for lengths, _ in pool[1:]) > max(len(pool[0][0]), MANY_GAPS):
                # Most parts have the same ones.
                pool = [_joined(pool)]
        lengths, counts = _joined(pool)
        return lengths[counts != 0], counts[counts != 0]

    def _gaps(self) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        parts = [pd.DataFrame(part._asdict()) for part in self.gap_parts()]
        pool: pd.DataFrame = pd.concat(parts, ignore_index=True)
        pool = pool.groupby(["time_ns", "length_ns"])["samples"].sum().reset_index()
        pool = pool[pool.samples != 0].reset_index(drop=True)
        return pd.DataFrame(
            {
                "time_s": pool.time_ns / NS_PER_S,
                "gap_s": pool.length_ns / NS_PER_S,
                "samples": pool.samples.astype(np.int64),
            }
        )

    def _stored_gaps(self) -> pd.DataFrame:
        import pyarrow as pa

        empty = arrow_schema(STORED_GAPS).empty_table()
        frame: pd.DataFrame = pa.concat_tables([empty, *self.parts("itl")]).to_pandas()
        return frame

    @cached_property
    def requests(self) -> pd.DataFrame:
        return self.frame("requests")

    @cached_property
    def steps(self) -> pd.DataFrame:
        return self.frame("steps")

    @cached_property
    def events(self) -> pd.DataFrame:
        return self.frame("events")

    @cached_property
    def blocks(self) -> pd.DataFrame:
        return self.frame("blocks")

    @cached_property
    def itl(self) -> pd.DataFrame:
        return self.frame("itl")

    @cached_property
    def tokens(self) -> pd.DataFrame:
        return self.frame("tokens")


def _joined(parts: Sequence[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s]:
    """The different numbers of all parts in ascending order, and the sums of what stands beside each."""
    import numpy as np

    numbers, place = np.unique(np.concatenate([n for n, _ in parts]), return_inverse=True)
    sums = np.bincount(place, weights=np.concatenate([w for _, w in parts]), minlength=len(numbers))
    return numbers, sums.astype(np.int64)


def replica_of(part: pa.Table) -> int:
    """Whose rows all of a part are; below 0: the door's."""
    replica = part[REPLICA][0].as_py() if len(part) else 0
    return NEVER if replica is None else int(replica)


def differences(a: Tables, b: Tables) -> list[str]:
    """Where two logs differ, one line per table and column; columns of NOT_COMPARED do not count."""
    return [line for table in SCHEMAS for line in _frame_differences(table, a.frame(table), b.frame(table))]


def tables_equal(a: Tables, b: Tables) -> bool:
    """Whether two logs say the same about a run."""
    return not differences(a, b)


def _frame_differences(table: str, a: pd.DataFrame, b: pd.DataFrame) -> Iterator[str]:
    if len(a) != len(b):
        yield f"{table}: {len(a)} rows against {len(b)}"
        return
    for column in a.columns:
        if column.startswith(NOT_COMPARED):
            continue
        unequal = (a[column] != b[column]) & ~(a[column].isna() & b[column].isna())
        if unequal.any():
            row = int(unequal.to_numpy().argmax())
            yield f"{table}.{column}: row {row}: {a[column][row]!r} against {b[column][row]!r}"


def ns_array(seconds: pd.Series[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A column of seconds as whole nanoseconds (float64, NaN for null): differences of them are exact."""
    import numpy as np

    return np.rint(seconds.to_numpy(dtype=np.float64) * NS_PER_S)
