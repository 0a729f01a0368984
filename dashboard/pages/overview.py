"""Key figures of a run, and what happened over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from servetwin.dashboard.charts import overview as charts
from servetwin.dashboard.figures import Latency
from servetwin.dashboard.latency_table import latency_table
from servetwin.dashboard.named_profile import named_profile
from servetwin.dashboard.notes import drawn_from, run_notes
from servetwin.dashboard.run_columns import Numbers
from servetwin.dashboard.state import State, time_chart
from servetwin.dashboard.step_times import foretell, step_times
from servetwin.dashboard.words import percent, quantity
from servetwin.sim.metrics import statistics_ms
from servetwin.sim.steptime.profiles import ProfileError

LANE_COLUMNS = ("start_s", "schedule_s", "prepare_start_s", "prepare_s", "device_start_s", "device_s", "rows")


def page(state: State) -> None:
    data = state.data()
    run_notes(data)
    latencies = data.latencies(state.metric_defs)
    _key_figures(data.summary, latencies)
    st.subheader("Over time")
    engine = state.engine()
    window = data.within(state.window)
    view = engine.steps(window, charts.STEP_COLUMNS)
    arrivals = engine.columns.numbers("requests", "arrival_s")
    time_chart(charts.time_series(view.frame, arrivals, window, _foretold(state)), "overview", state)
    drawn_from(view, "Draw a box in a panel to look at that time in all charts.")
    _lanes(state)
    left, right = st.columns([2, 1])
    with left:
        latency_table(latencies, state.metric_defs)
    with right:
        st.subheader("How requests ended")
        st.plotly_chart(charts.finish_reasons(data.summary["servetwin"]["requests"]), key="finish_reasons")


def _key_figures(summary: Mapping[str, Any], latencies: Mapping[str, Latency]) -> None:
    ours = summary["servetwin"]
    figures = {
        "Completed requests": f"{summary['completed']:,} of {summary['completed'] + summary['failed']:,}",
        "Request throughput": quantity(summary["request_throughput"], "/s"),
        "Output throughput": quantity(summary["output_throughput"], " tokens/s"),
        "Median TTFT": _median(latencies["ttft"]),
        "Median TPOT": _median(latencies["tpot"]),
        "Preemptions": f"{ours['preemptions']:,}",
        "Prefix hits": percent(ours["prefix_hit_rate"]),
        "Peak KV use": percent(ours["kv_peak_used_fraction"]),
    }
    columns = [*st.columns(len(figures) // 2), *st.columns(len(figures) // 2)]
    for column, (label, value) in zip(columns, figures.items(), strict=True):
        column.metric(label, value)
    st.caption("Of the whole run, whatever the window.")


def _median(latency: Latency) -> str:
    return quantity(statistics_ms(latency.distribution)["p50"], " ms")


def _foretold(state: State) -> tuple[Numbers, Numbers] | None:
    """By the profile that was named on the page of step times."""
    try:
        profile = named_profile()
    except (ProfileError, OSError):
        return None
    if profile is None:
        return None
    data = state.one_engine()
    times = step_times(data, data.within(state.window))
    return times.start_s, foretell(profile.step_model(), times).device_ms


def _lanes(state: State) -> None:
    """Where steps are in flight beside each other, one wants to see how."""
    if not state.data().is_async:
        return
    st.subheader("Host and device")
    data = state.one_engine()
    view = data.steps(data.within(state.window), LANE_COLUMNS)
    if not view.exact:
        st.info("Choose a shorter window to see its first steps on host and device.")
        return
    first = view.frame.head(charts.LANE_STEPS)
    if first[["schedule_s", "prepare_s"]].to_numpy().sum() == 0:
        st.caption(
            "This run has no host time: neither scheduling nor preparing a step was modelled or measured."
        )
    time_chart(charts.lanes(first), "lanes", state)
    st.caption(
        f"The first {len(first):,} steps of the window. Scheduling is asynchronous: a step is planned and prepared "
        "while the one before it runs."
    )
