"""The charts of a report, which are the dashboard's, in the order of reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from servetwin.dashboard.charts import overview as charts
from servetwin.sim.runs import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class ReportChart:
    """A figure with what it shows in words."""

    title: str
    caption: str
    figure: go.Figure
    over_time: bool = False
    """Its x axis is the time of the run: it zooms with the others of its kind."""


def report_charts(run: Run, summary: dict[str, Any]) -> list[ReportChart]:
    """Those that the run has data for; none for a run without a step."""
    if not len(run.steps):
        return []
    return [
        ReportChart(
            "Requests",
            "Running and waiting requests after each schedule call.",
            charts.requests_over_time(run.steps),
            over_time=True,
        ),
        ReportChart(
            "KV cache",
            "Usable blocks: held by requests, free with content that can still be hit, free.",
            charts.kv_blocks_over_time(run.steps),
            over_time=True,
        ),
        ReportChart(
            "How requests ended",
            "Requests by finish reason; open: had not ended when the run did.",
            charts.finish_reasons(summary["servetwin"]["requests"]),
        ),
    ]
