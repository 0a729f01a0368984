"""The part of a log that the life of one request needs: what happened while it was there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.dashboard.run_data import RunData, Window
from servetwin.dashboard.step_view import step_rows_between
from servetwin.sim.tables import Tables

if TYPE_CHECKING:
    import pyarrow as pa


class LifeLog(Tables):
    """Requests: all with this id. Events and steps: those that touch its time."""

    def __init__(self, data: RunData, request_id: str) -> None:
        self._data = data
        self._request_id = request_id

    def parts(self, table: str) -> Sequence[pa.Table]:
        match table:
            case "requests":
                return self._rows
            case "events":
                return self._events
            case "steps":
                return self._steps
            case _:
                return []

    @cached_property
    def _rows(self) -> list[pa.Table]:
        """Its row or, where an id was used twice, its rows."""
        import pyarrow.compute as pc

        ids = self._data.columns.texts("requests", "request_id")
        places = pc.indices_nonzero(pc.equal(ids, self._request_id)).to_numpy()
        return [self._data.columns.row("requests", int(place)) for place in places]

    @cached_property
    def _life(self) -> Window:
        """From arrival to end; the whole run where no row says."""
        if not self._rows:
            return self._data.span_s
        end = self._rows[0]["finish_s"][0].as_py()
        return self._rows[0]["arrival_s"][0].as_py(), self._data.span_s[1] if end is None else end

    @cached_property
    def _events(self) -> list[pa.Table]:
        import pyarrow.compute as pc

        low, high = self._life
        found = self._one_of_each()
        for name in self._data.columns.part_names("events"):
            if not _touches(self._data.run.path / name, low, high):
                continue
            part = self._data.columns.whole_part("events", name)
            ends = pc.coalesce(part["until_s"], part["time_s"])
            inside = pc.and_(pc.less_equal(part["time_s"], high), pc.greater_equal(ends, low))
            found.append(part.filter(inside))
        return found

    @cached_property
    def _steps(self) -> list[pa.Table]:
        """With the step that ran when it arrived, and the one before it, of every replica."""
        low, high = self._life
        found = []
        for engine in self._data.engines:
            starts = engine.columns.numbers("steps", "start_s")
            first = max(int(np.searchsorted(starts, low, side="left")) - 2, 0)
            last = int(np.searchsorted(starts, high, side="right"))
            found += step_rows_between(engine.columns, first, last)
        return found

    def _one_of_each(self) -> list[pa.Table]:
        """An event of every replica where there are several: that is how a story knows that there are."""
        if len(self._data.replicas) < 2:
            return []
        parts = [engine.columns.part_names("events")[:1] for engine in self._data.engines]
        return [
            self._data.columns.whole_part("events", name).slice(0, 1) for names in parts for name in names
        ]


def _touches(file: Path, low: float, high: float) -> bool:
    """Whether some event of a part may touch a stretch of time, by the statistics that the part carries."""
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(file)
    columns = {metadata.schema.column(i).name: i for i in range(metadata.num_columns)}
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    begun = [_bound(group, columns["time_s"], "min") for group in groups]
    ends = [_bound(group, columns[name], "max") for group in groups for name in ("time_s", "until_s")]
    known = [t for t in begun if t is not None], [t for t in ends if t is not None]
    return not known[0] or not known[1] or (min(known[0]) <= high and max(known[1]) >= low)


def _bound(group: Any, column: int, which: str) -> float | None:
    statistics = group.column(column).statistics
    if statistics is None or not statistics.has_min_max:
        return None
    return float(getattr(statistics, which))
