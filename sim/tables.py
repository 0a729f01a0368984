"""The tables of one run as a reader gets them.

Everything shown or summarised is computed from these frames, so a log in memory and one on disk take the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from servetwin.sim.columns import NOT_COMPARED, ORDER, SCHEMAS, STORED_GAPS, arrow_schema
from servetwin.sim.step_rows import expanded, num_leapt, regular_gaps
from servetwin.sim.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


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
        parts = self.parts(table)
        if table == "steps":
            parts = [expanded(part) for part in parts]
        frame: pd.DataFrame = pa.concat_tables(
            [arrow_schema(SCHEMAS[table]).empty_table(), *parts]
        ).to_pandas()
        if table in ORDER:
            frame = frame.sort_values(ORDER[table], kind="stable", ignore_index=True)
        return frame

    def _gaps(self) -> pd.DataFrame:
        """The pool of gaps: those over one step from the steps, the others from their own parts."""
        import numpy as np
        import pandas as pd

        ends, regular = self._regular_gaps()
        steps = pd.DataFrame({"time": ends, "gap": np.diff(ends, prepend=0), "samples": regular})
        odd = self._odd_gaps()
        pool: pd.DataFrame = pd.concat([steps[steps.samples != 0], odd], ignore_index=True)
        if len(odd):
            pool = pool.groupby(["time", "gap"])["samples"].sum().reset_index()
            pool = pool[pool.samples != 0].reset_index(drop=True)
        return pd.DataFrame(
            {
                "time_s": pool.time / NS_PER_S,
                "gap_s": pool.gap / NS_PER_S,
                "samples": pool.samples.astype(np.int64),
            }
        )

    def _regular_gaps(self) -> tuple[Int64s, Int64s]:
        """Of every step its end in ns, and the rows with a gap over this step alone, of completed requests."""
        import numpy as np

        parts = [regular_gaps(part) for part in self.parts("steps")]
        if not parts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        ends, regular = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        gaps = self._stored_gaps()
        taken = gaps[gaps.from_step.notna()]
        change = np.zeros(len(ends) + 1, dtype=np.int64)
        np.add.at(
            change, taken.from_step.to_numpy(dtype=np.int64) + 1, taken.samples.to_numpy(dtype=np.int64)
        )
        np.add.at(change, taken.to_step.to_numpy(dtype=np.int64) + 1, -taken.samples.to_numpy(dtype=np.int64))
        return ends, regular + np.cumsum(change)[:-1]

    def _odd_gaps(self) -> pd.DataFrame:
        """The gaps that are stored one by one: time, gap (ns), samples."""
        import pandas as pd

        gaps = self._stored_gaps()
        gaps = gaps[gaps.from_step.isna()]
        times, lengths = ns_array(gaps.time_s), ns_array(gaps.gap_s)
        return pd.DataFrame(
            {"time": times.astype("int64"), "gap": lengths.astype("int64"), "samples": gaps.samples}
        )

    def _stored_gaps(self) -> pd.DataFrame:
        import pyarrow as pa

        empty = arrow_schema(STORED_GAPS).empty_table()
        frame: pd.DataFrame = pa.concat_tables([empty, *self.parts("itl")]).to_pandas()
        return frame

    def step_frames(self, names: Sequence[str]) -> Iterator[pd.DataFrame]:
        """Some columns of `steps`, part by part: a long run's steps need not be in memory all at once."""
        for part in self.parts("steps"):
            yield expanded(part, names).to_pandas()

    def num_leapt(self) -> int:
        """Steps that were taken many at once."""
        return sum(num_leapt(part) for part in self.parts("steps"))

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
