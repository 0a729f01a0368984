"""The charts of a report, which are the dashboard's, in the order of reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from servetwin.dashboard.charts import overview
from servetwin.dashboard.run_data import RunData

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


def report_charts(data: RunData, summary: dict[str, Any]) -> list[ReportChart]:
    """Those that the run has data for; none for a run without a step."""
    view = data.steps(None, overview.STEP_COLUMNS)
    if not view.num_steps:
        return []
    arrivals_s = data.columns.numbers("requests", "arrival_s")
    return [
        ReportChart(
            "Load, queue, KV cache and steps over time",
            "Arrivals; running and waiting requests; usable blocks held by requests, free with content that can "
            "still be hit, free; tokens and time of each step. A count holds from its schedule call to the next.",
            overview.time_series(view.frame, arrivals_s, data.span_s),
            over_time=True,
        ),
        ReportChart(
            "How requests ended",
            "Requests by finish reason; open: had not ended when the run did.",
            overview.finish_reasons(summary["servetwin"]["requests"]),
        ),
    ]
