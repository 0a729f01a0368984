"""One run as the pages and the report read it: columns, steps of a window, events of a kind, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from servetwin.dashboard.figures import Latency, completed, latencies, summary_of, timestamps
from servetwin.dashboard.residencies import Residencies
from servetwin.dashboard.run_columns import RunColumns
from servetwin.dashboard.step_view import StepView, merged, step_rows_between, steps_between
from servetwin.sim.columns import SCHEMAS
from servetwin.sim.definitions import Timestamps
from servetwin.sim.runs import Run
from servetwin.sim.step_rows import expanded

if TYPE_CHECKING:
    import pandas as pd

Window = tuple[float, float]
"""From and to, in seconds of the run."""


class RunData:
    """A run folder in one state; read-only, so that sessions can share it."""

    def __init__(
        self, run: Run, version_ns: int, previous: RunData | None = None, replica: int | None = None
    ) -> None:
        """`version_ns`: when its run.json last changed. `previous`: an earlier state, whose columns are used again.

        `replica`: only the rows of that one; figures and latencies are of the whole run all the same.
        """
        self.run = run
        self.version_ns = version_ns
        self.replica = replica
        self.columns: RunColumns = RunColumns(run, None if previous is None else previous.columns, replica)
        self._replicas: dict[int, RunData] = {}

    @cached_property
    def replicas(self) -> list[int]:
        """Engines of the run; one number where there is only one."""
        return self.columns.replicas() if self.replica is None else [self.replica]

    def of_replica(self, replica: int) -> RunData:
        """What happened at one of several."""
        if replica not in self._replicas:
            self._replicas[replica] = RunData(self.run, self.version_ns, replica=replica)
        return self._replicas[replica]

    @property
    def engines(self) -> list[RunData]:
        """Each replica, or the run itself where there is one."""
        return [self.of_replica(k) for k in self.replicas] if len(self.replicas) > 1 else [self]

    @property
    def identity(self) -> tuple[str, int]:
        """Folder and state, for caches."""
        return f"{self.run.path} {self.replica}", self.version_ns

    @property
    def has_engine(self) -> bool:
        """Whether a scheduler wrote it, and not `servetwin execute`."""
        return "engine" in self.run.config

    @cached_property
    def span_s(self) -> Window:
        """From 0 to the end of what is logged."""
        if len(self.replicas) > 1:
            return 0.0, max(engine.span_s[1] for engine in self.engines)
        ends = [0.0]
        if rows := len(self.columns.numbers("steps", "start_s")):
            last = step_rows_between(self.columns, rows - 1, rows)
            ends += [_latest(expanded(part, ["end_s"])["end_s"].to_numpy()) for part in last]
        ends += [_latest(self.columns.numbers("requests", name)) for name in ("arrival_s", "finish_s")]
        return 0.0, max(ends)

    def within(self, window: Window | None) -> Window:
        """A window as far as the run goes."""
        low, high = window or self.span_s
        return low, max(min(high, self.span_s[1]), low)

    @property
    def is_async(self) -> bool:
        """Whether steps are scheduled while others run."""
        scheduler = self.run.config.get("engine", {}).get("scheduler", {})
        return bool(scheduler.get("async_scheduling"))

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Figures of the whole run: `summary.json`, or the same of what is written so far."""
        return summary_of(self.run, self.columns)

    @cached_property
    def completed_times(self) -> Timestamps:
        """Completed requests, in order of writing."""
        return timestamps(self.columns, np.flatnonzero(completed(self.columns)))

    def latencies(self, metric_defs: str) -> Mapping[str, Latency]:
        """All latencies of completed requests by this set of definitions."""
        if metric_defs not in self._latencies:
            self._latencies[metric_defs] = latencies(self.run, self.completed_times, metric_defs)
        return self._latencies[metric_defs]

    @cached_property
    def _latencies(self) -> dict[str, Mapping[str, Latency]]:
        return {}

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; 0 where no scheduler wrote the run."""
        size: int = self.run.config.get("engine", {}).get("cache", {}).get("block_size", 0)
        return size

    @cached_property
    def usable_blocks(self) -> int:
        """Blocks that requests can get, as its steps count them; 0 without steps."""
        names = ("used_blocks", "cached_free_blocks", "free_blocks")
        counts = [self.columns.numbers("steps", name)[:1] for name in names]
        return int(sum(count.sum() for count in counts))

    @cached_property
    def residencies(self) -> Residencies | None:
        """Who had which block; None where the run did not log it."""
        if not len(self.columns.numbers("blocks", "block_id")):
            return None
        return Residencies.of(self.columns, self.span_s[1])

    def requests(self, names: Sequence[str]) -> pd.DataFrame:
        """Columns of requests/ in order of writing; texts of few values as categories, ids not (see `request_ids`)."""
        import pandas as pd

        return pd.DataFrame({name: self._column("requests", name) for name in names}, copy=False)

    def request_ids(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[str]:
        """The ids of some requests."""
        ids: list[str] = self.columns.texts("requests", "request_id").take(rows).to_pylist()
        return ids

    def steps(self, window: Window | None, names: Sequence[str]) -> StepView:
        """Steps in a window, or all of them (`step_view`); of several replicas together (`merged`)."""
        low, high = window or self.span_s
        return merged([steps_between(engine.columns, low, high, names) for engine in self.engines])

    def events(self, *kinds: str) -> pd.DataFrame:
        """All events of these kinds in order of time; meant for kinds that are not one a request."""
        if kinds not in self._events:
            self._events[kinds] = self._events_of(kinds)
        return self._events[kinds]

    @cached_property
    def _events(self) -> dict[tuple[str, ...], pd.DataFrame]:
        return {}

    def _events_of(self, kinds: Sequence[str]) -> pd.DataFrame:
        import pyarrow as pa
        import pyarrow.compute as pc

        from servetwin.sim.columns import arrow_schema

        wanted = pa.array(kinds)
        parts = self.columns.parts("events", [*SCHEMAS["events"]])
        found = [part.filter(pc.is_in(part["kind"], wanted)) for part in parts]
        empty = arrow_schema(SCHEMAS["events"]).empty_table()
        frame: pd.DataFrame = pa.concat_tables([empty, *found]).to_pandas()
        return frame.sort_values("time_s", kind="stable", ignore_index=True)

    def _column(self, table: str, name: str) -> Any:
        if SCHEMAS[table][name] == "text":
            return self.columns.categories(table, name)
        return self.columns.numbers(table, name)


def _latest(times_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.nan_to_num(times_s).max(initial=0))
