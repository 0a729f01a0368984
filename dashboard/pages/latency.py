"""Latencies by any tool's definitions, and how many requests keep limits."""

from __future__ import annotations

import numpy as np
import streamlit as st

from servetwin.dashboard.charts import latency as charts
from servetwin.dashboard.figures import completed
from servetwin.dashboard.latency_table import latency_table
from servetwin.dashboard.notes import run_notes
from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.slo import Attainment, Limits, attainment, over_time
from servetwin.dashboard.state import State, keep, positive, time_chart
from servetwin.dashboard.words import percent, quantity
from servetwin.sim.definitions import DEFINITIONS, RATES

DRAWN = ("ttft", "tpot", "itl", "e2e", "queue", "ntpot")
FACTORS = np.geomspace(0.1, 10, 400)
BINS = 100


def page(state: State) -> None:
    data = state.data()
    run_notes(data)
    latencies = data.latencies(state.metric_defs)
    limits = _limits()
    latency_table(latencies, state.metric_defs)
    with st.expander("What other tools mean by these words"):
        for name, chosen in DEFINITIONS.items():
            formulas = "\n".join(
                f"- {metric.upper()} = {words}" for metric, words in chosen.formulas().items()
            )
            st.markdown(f"**{name}**\n\n{formulas}")
    st.subheader("Distributions")
    drawn = {latencies[name].label: latencies[name].distribution for name in DRAWN if name in latencies}
    named = {latencies[name].label: limit for name, limit in limits.named().items()}
    st.plotly_chart(charts.cdfs(drawn, named), key="cdfs")
    st.caption("Cumulative: the share of completed requests (of ITL: of gaps) up to each latency.")
    _objectives(state, data, limits)


def _limits() -> Limits:
    with st.sidebar:
        st.subheader("Limits")
        return Limits(*(_limit(name) for name in ("ttft", "tpot", "e2e")))


def _limit(name: str) -> float | None:
    key = f"{name}_limit_ms"
    keep(key, name, read=positive)
    st.session_state.setdefault(key, None)
    value: float | None = st.number_input(
        f"{name.upper()} (ms)", min_value=0.0, placeholder="no limit", key=key
    )
    return value or None


def _objectives(state: State, data: RunData, limits: Limits) -> None:
    st.subheader("Within the limits")
    if not limits.named():
        st.info("Set a limit in the sidebar: TTFT, TPOT or E2E in ms.")
        return
    ended = len(data.columns.numbers("requests", "arrival_s"))
    found = attainment(data.completed_times, limits, state.metric_defs, ended, data.summary["duration"])
    left, middle, right = st.columns(3)
    left.metric("Within all limits", percent(found.share))
    middle.metric("Goodput", quantity(found.goodput, " requests/s"))
    right.metric("Throughput", quantity(data.summary["request_throughput"], " requests/s"))
    st.plotly_chart(charts.attainment_curve(FACTORS, found.curve(FACTORS)), key="attainment")
    _over_time(state, data, found)
    formulas = DEFINITIONS[state.metric_defs].formulas()
    meant = "; ".join(f"{name.upper()} = {formulas[name]}" for name in limits.named())
    st.caption(
        "Share: completed requests within all limits, of all that ended (whoever was refused or aborted kept none; "
        f"TPOT of one token is 0). Goodput = their number / duration, duration = {RATES['duration']}. {meant}."
    )


def _over_time(state: State, data: RunData, found: Attainment) -> None:
    good = np.zeros(found.ended, dtype=bool)
    good[np.flatnonzero(completed(data.columns))] = found.strain <= 1
    arrival = data.columns.numbers("requests", "arrival_s")
    figure = charts.attainment_over_time(*over_time(arrival, good, data.within(state.window), BINS))
    time_chart(figure, "attainment_over_time", state)
