"""Two runs side by side, request by request, as the Compare page shows them (`servetwin compare` says more).

Works on a few columns of requests/, so that runs of a million requests fit; their intervals are computed when asked
for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from servetwin.dashboard.figures import summary_of
from servetwin.dashboard.run_columns import RunColumns
from servetwin.sim.comparison import (
    Difference,
    configuration_differences,
    formulas_of,
    latency_metrics,
    nothing_paired,
    paired_latencies,
    pairing_notes,
    run_figures,
)
from servetwin.sim.definitions import Metric, RequestMetric
from servetwin.sim.metric_names import MetricName
from servetwin.sim.metrics import timestamps
from servetwin.sim.pairing import Pairs, pair
from servetwin.sim.planning.bootstrap import BlockBootstrap
from servetwin.sim.runs import Run, RunFolderError

if TYPE_CHECKING:
    import pandas as pd

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E", "queue": "queue"}
STATISTICS = ("mean", "median", "p90", "p99")
FIGURES = (
    "request_throughput", "output_throughput", "duration", "busy_time_s", "preemptions", "recomputed_tokens",
    "cached_prompt_fraction", "kv_peak_used_fraction", "evictions",
)  # fmt: skip
COLUMNS = (
    "num_prompt_tokens", "num_output_tokens", "arrival_s", "sent_s", "queued_s", "first_scheduled_s",
    "first_token_s", "last_token_s", "finish_s",
)  # fmt: skip
PAIRS_AT_ONCE = 100_000
"""Intervals of so many pairs take a second or two."""
QUANTILES = 500


@dataclass(frozen=True)
class Compared:
    """Run B against run A. Small, however long the runs were."""

    num_pairs: int
    latencies: Mapping[str, Difference]
    """By name, such as `p99_ttft`; in ms."""
    figures: Mapping[str, Difference]
    """Of the runs as wholes."""
    formulas: Mapping[str, str]
    notes: list[str]
    configuration: Mapping[str, tuple[Any, Any]]
    quantiles: Mapping[str, tuple[Floats, Floats, Floats]]
    """Latency -> values in ms of A, of B, and of the change from A to B of each pair, at equidistant shares."""


def compare(a: Run, b: Run, metric_defs: str, *, intervals: bool) -> Compared:
    """Raises RunFolderError where no request completed in both runs, or an id stands twice in one of them."""
    differing = configuration_differences(a, b)
    pairs = _paired(a, b)
    metrics = latency_metrics(metric_defs)
    names = [MetricName(statistic, latency) for latency in LATENCIES for statistic in STATISTICS]
    bootstrap = BlockBootstrap(len(pairs)) if intervals else None
    first, second = (summary_of(run, RunColumns(run)) for run in (a, b))
    return Compared(
        len(pairs),
        paired_latencies(pairs, metrics, names, bootstrap),
        run_figures(first, second, [MetricName(None, figure) for figure in FIGURES]),
        formulas_of(pairs, metrics),
        [*_states(a, b), *pairing_notes(pairs)],
        differing,
        {name: _quantiles(pairs, metrics[name]) for name in LATENCIES},
    )


def _paired(a: Run, b: Run) -> Pairs:
    """Without the ids, which have done their duty."""
    try:
        pairs = pair(_requests(a), _requests(b))
    except ValueError as e:
        raise RunFolderError(str(e)) from e
    if not len(pairs):
        raise RunFolderError(nothing_paired(pairs))
    done = ["request_id", "finish_reason"]
    return replace(pairs, a=pairs.a.drop(columns=done), b=pairs.b.drop(columns=done))


def num_requests(run: Run) -> int:
    """Rows of requests/, which the ends of its files tell."""
    return sum(pq.read_metadata(run.path / name).num_rows for name in run.header["parts"].get("requests", []))


def _requests(run: Run) -> pd.DataFrame:
    """In order of arrival, ties in order of writing."""
    import pandas as pd

    def column(name: str) -> Any:
        # Each read by itself and let go: only what is sorted stays.
        return RunColumns(run).numbers("requests", name)

    order = np.argsort(column("arrival_s"), kind="stable")
    columns = {name: column(name)[order] for name in COLUMNS}
    columns["finish_reason"] = RunColumns(run).categories("requests", "finish_reason").take(order)
    ids = RunColumns(run).texts("requests", "request_id").take(order)
    columns["request_id"] = pd.array(ids, dtype="string[pyarrow]")
    return pd.DataFrame(columns, copy=False)


def _states(a: Run, b: Run) -> list[str]:
    found = []
    for side, run in (("A", a), ("B", b)):
        if run.state != "complete":
            reason = f" ({run.reason})" if run.reason else ""
            found.append(f"{side} is {run.state}{reason}: what it has written so far is compared")
    if a.header.get("seed") != b.header.get("seed"):
        found.append("the runs have different seeds: pairs share their ids, not their draws")
    return found


def _quantiles(pairs: Pairs, metric: Metric) -> tuple[Floats, Floats, Floats]:
    assert isinstance(metric, RequestMetric)
    first, second = (metric.of(timestamps(frame)) / 1e6 for frame in (pairs.a, pairs.b))
    known = ~np.isnan(first) & ~np.isnan(second)
    first, second = first[known], second[known]
    shares = np.linspace(0, 1, QUANTILES)

    def at_shares(values: Floats) -> Floats:
        return (
            np.sort(values)[np.rint(shares * (len(values) - 1)).astype(np.int64)] if len(values) else values
        )

    return at_shares(first), at_shares(second), at_shares(second - first)
