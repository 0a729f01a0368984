"""Key figures of a run, and what happened over time."""

from __future__ import annotations

from servetwin.dashboard.charts import overview as charts
from servetwin.dashboard.notes import run_notes
from servetwin.dashboard.run_data import RunData, Window
from servetwin.dashboard.state import State, time_chart


def page(state: State) -> None:
    data = state.data()
    run_notes(data)
    window = shown_window(state, data)
    view = data.steps(window, charts.STEP_COLUMNS)
    arrivals = data.columns.numbers("requests", "arrival_s")
    time_chart(charts.time_series(view.frame, arrivals, window), "overview", state)


def shown_window(state: State, data: RunData) -> Window:
    """The chosen window within the run."""
    low, high = state.window or data.span_s
    return low, min(high, data.span_s[1])
