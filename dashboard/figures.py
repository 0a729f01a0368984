"""Figures of a run that are computed here: latencies by any set of definitions, from a few columns of requests/.

Everything else comes from the run's summary, which a complete run has written and others are summed up for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from servetwin.dashboard.run_columns import Numbers, RunColumns
from servetwin.sim.columns import COMPLETED
from servetwin.sim.definitions import (
    CLIENT_INTERVALS,
    ENGINE_INTERVALS,
    Metric,
    RequestMetric,
    Timestamps,
    definitions,
)
from servetwin.sim.metrics import Distribution, summarize
from servetwin.sim.runs import Run

if TYPE_CHECKING:
    import pandas as pd

LABELS = {
    "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "ntpot": "NTPOT",
    "queue": "queue", "prefill": "prefill", "decode": "decode", "inference": "inference",
}  # fmt: skip
PER_REQUEST = ("ttft", "tpot", "e2e", "queue")
"""Latencies of which every request has one, whatever the definitions; limits can be set on them."""


class Latency(NamedTuple):
    """One quantity of completed requests."""

    label: str
    formula: str
    distribution: Distribution
    """In ns."""


def completed(columns: RunColumns) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows of requests/ got their whole answer, [rows]."""
    done: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.asarray(
        columns.categories("requests", "finish_reason").isin(COMPLETED)
    )
    return done


STAMPS = ("arrival_s", "sent_s", "queued_s", "first_scheduled_s", "first_token_s", "last_token_s", "finish_s")


def timestamps(columns: RunColumns, rows: Numbers) -> Timestamps:
    """Some requests as arrays in ns; `rows`: indices or a mask."""
    columns.load("requests", STAMPS)

    def ns(name: str) -> Numbers:
        return np.rint(columns.numbers("requests", name)[rows] * 1e9)

    arrival, sent = ns("arrival_s"), ns("sent_s")
    return Timestamps(
        arrival=arrival,
        # Runs of before the column was added held nothing back.
        sent=np.where(np.isnan(sent), arrival, sent),
        queued=ns("queued_s"),
        first_scheduled=ns("first_scheduled_s"),
        first_token=ns("first_token_s"),
        last_token=ns("last_token_s"),
        finish=ns("finish_s"),
        output_tokens=columns.numbers("requests", "num_output_tokens")[rows].astype(np.float64),
    )


def metrics_of(metric_defs: str) -> dict[str, Metric]:
    """Name -> what it means in this set, with the engine's own intervals."""
    return definitions(metric_defs).metrics() | dict(ENGINE_INTERVALS)


def latencies(run: Run, times: Timestamps, metric_defs: str) -> dict[str, Latency]:
    """All latencies of completed requests (`times`), and the pooled gaps of the run."""
    held_back = bool((times.sent > times.arrival).any())
    metrics = metrics_of(metric_defs) | (dict(CLIENT_INTERVALS) if held_back else {})
    return {
        name: Latency(
            LABELS.get(name, name.replace("_", " ")),
            metric.words(held_back=held_back),
            _values(metric, times, run),
        )
        for name, metric in metrics.items()
    }


def samples_ns(metric_defs: str, name: str, times: Timestamps) -> Numbers:
    """A latency of PER_REQUEST for every request, [requests], NaN where it has none."""
    metric = metrics_of(metric_defs)[name]
    assert isinstance(metric, RequestMetric)
    return metric.of(times)


def _values(metric: Metric, times: Timestamps, run: Run) -> Distribution:
    if isinstance(metric, RequestMetric):
        values = np.sort(metric.of(times))
        # NaN stand last; equal values need not be joined.
        values = values[: len(values) - int(np.isnan(values).sum())]
        return Distribution(values, np.arange(1, len(values) + 1))
    lengths, counts = run.gap_lengths
    return Distribution.of(lengths.astype(np.float64), counts.astype(np.float64))


def summary_of(run: Run, columns: RunColumns) -> Mapping[str, Any]:
    """What `summary.json` says, or would say of what is written so far."""
    if run.state == "complete":
        return run.summary
    return summarize(_FiguresOnly(run, columns))


class _FiguresOnly(Run):
    """A run whose frames have only what figures need: no ids, of events few."""

    def __init__(self, run: Run, columns: RunColumns) -> None:
        super().__init__(run.path, run.header)
        self._columns = columns

    def frame(self, table: str) -> pd.DataFrame:
        import pandas as pd

        from servetwin.sim.columns import SCHEMAS

        if table == "events":
            return self._few_events()
        if table != "requests":
            return super().frame(table)
        numbers = {
            name: self._columns.numbers(table, name)
            for name, kind in SCHEMAS[table].items()
            if kind != "text"
        }
        reasons = {"finish_reason": self._columns.categories(table, "finish_reason")}
        return pd.DataFrame(numbers | reasons, copy=False)

    def _few_events(self) -> pd.DataFrame:
        """Of one engine: arrivals, and what happened to no request; of several: all. In the place of an id "-"."""
        import pyarrow as pa
        import pyarrow.compute as pc

        from servetwin.sim.columns import SCHEMAS, arrow_schema

        names = [*SCHEMAS["events"]]
        several = len(self._columns.replicas()) > 1
        parts = [arrow_schema(SCHEMAS["events"]).empty_table()]
        for part in self._columns.parts("events", names):
            needed = pc.or_(pc.is_null(part["request_id"]), pc.equal(part["kind"], "arrived"))
            some = part if several else part.filter(needed)
            named = pc.if_else(pc.is_null(some["request_id"]), pa.scalar(None, pa.string()), "-")
            parts.append(some.set_column(names.index("request_id"), "request_id", named))
        frame: pd.DataFrame = pa.concat_tables(parts).to_pandas()
        return frame.sort_values("time_s", kind="stable", ignore_index=True)
