"""The charts of a report, which are the dashboard's, in the order of reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from servetwin.dashboard import kv_losses
from servetwin.dashboard.block_map import block_map
from servetwin.dashboard.charts import kv, latency, overview, step_time
from servetwin.dashboard.charts.requests import gantt
from servetwin.dashboard.request_lives import Filter, choose, segments
from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.step_times import step_times

if TYPE_CHECKING:
    import plotly.graph_objects as go

LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue", "ntpot")
REQUESTS = 40
EVICTION_BINS = 200


@dataclass(frozen=True)
class ReportChart:
    """A figure with what it shows in words."""

    title: str
    caption: str
    figure: go.Figure
    over_time: bool = False
    """Its x axis is the time of the run: it zooms with the others of its kind."""


def report_charts(data: RunData, metric_defs: str) -> list[ReportChart]:
    """Those that the run has data for; none for a run without a step."""
    if not len(data.columns.numbers("steps", "start_s")):
        return []
    return [
        *_over_time(data),
        *_latencies(data, metric_defs),
        *_requests(data),
        *_kv_cache(data),
        *_steps(data),
    ]


def _over_time(data: RunData) -> Iterator[ReportChart]:
    view = data.steps(None, overview.STEP_COLUMNS)
    arrivals_s = data.columns.numbers("requests", "arrival_s")
    yield ReportChart(
        "Load, queue, KV cache and steps over time",
        "Arrivals; running and waiting requests; usable blocks held by requests, free with content that can still be "
        "hit, free; tokens and time of each step. A count holds from its schedule call to the next.",
        overview.time_series(view.frame, arrivals_s, data.span_s),
        over_time=True,
    )


def _latencies(data: RunData, metric_defs: str) -> Iterator[ReportChart]:
    found = data.latencies(metric_defs)
    drawn = {found[name].label: found[name].distribution for name in LATENCIES if name in found}
    if any(distribution.count for distribution in drawn.values()):
        yield ReportChart(
            "Distributions of the latencies",
            "The share of completed requests (of ITL: of gaps between outputs) up to each latency.",
            latency.cdfs(drawn),
        )
    yield ReportChart(
        "How requests ended",
        "Requests by finish reason; open: had not ended when the run did.",
        overview.finish_reasons(data.summary["servetwin"]["requests"]),
    )


def _requests(data: RunData) -> Iterator[ReportChart]:
    """Lives around the one in which most happened: with most preemptions, else with the longest queue time."""
    preempted = (data.columns.numbers("requests", "preemptions") > 0).any()
    order = "most preemptions" if preempted else "longest queue time"
    most = choose(data, Filter(data.span_s, order=order, limit=1)).rows
    if not len(most):
        return
    by_arrival = np.argsort(data.columns.numbers("requests", "arrival_s"), kind="stable")
    first = max(int(np.flatnonzero(by_arrival == most[0])[0]) - REQUESTS // 2, 0)
    rows = by_arrival[first : first + REQUESTS]
    lives = segments(data, rows)
    window = (float(lives.from_s.min()), float(lives.to_s.max())) if len(lives) else data.span_s
    yield ReportChart(
        f"Requests around {data.request_ids(most)[0]}",
        f"It has the {order}. Queued until first scheduled, prefill until the first token, decode until the last; "
        "preempted: waiting for blocks to come back.",
        gantt(lives, data.request_ids(rows), window),
    )


def _kv_cache(data: RunData) -> Iterator[ReportChart]:
    begins_s, counts = kv_losses.evictions_over_time(data, data.span_s, EVICTION_BINS)
    if counts.sum():
        yield ReportChart(
            "Evictions from the prefix cache",
            f"{int(counts.sum()):,} blocks whose cached content gave way to new content.",
            kv.evictions(begins_s, counts, data.span_s),
            over_time=True,
        )
    res = data.residencies
    if res is None or not len(res.block):
        return
    cells = block_map(res, data.span_s, (0, int(res.block.max())))
    preempted_s = data.events("preempted").time_s.to_list()
    yield ReportChart(
        "Who holds which KV block",
        f"{len(cells.block_ids)} blocks of the pool at {len(cells.times_s)} instants. Dotted lines: preemptions, the "
        f"first {kv.MARKS_AT_MOST} at most.",
        kv.block_map(cells, res.request_ids.to_pylist(), "state", preempted_s),
        over_time=True,
    )


def _steps(data: RunData) -> Iterator[ReportChart]:
    times = step_times(data, data.span_s)
    if len(times) and np.isfinite(times.device_ms).any():
        yield ReportChart(
            "Step time by tokens",
            "Time on the device (forward and sampling) of steps of prompts, of decode rows, and of both.",
            step_time.against_tokens(times.new_tokens, times.device_ms, times.regimes),
        )
