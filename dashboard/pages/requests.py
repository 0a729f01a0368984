"""Requests one by one: when each waited, ran and was preempted, and the life of one with the reason of each wait."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from servetwin.dashboard.charts.requests import gantt, where_time_went
from servetwin.dashboard.notes import run_notes
from servetwin.dashboard.request_lives import OPEN, ORDERS, Chosen, Filter, choose, segments, story, table
from servetwin.dashboard.run_data import RunData, Window
from servetwin.dashboard.state import State, keep, one_of, time_chart
from servetwin.dashboard.words import counted
from servetwin.sim.columns import COMPLETED
from servetwin.sim.explain import Story
from servetwin.sim.explain_life import UnknownRequestError
from servetwin.sim.explain_text import lines

REASONS = (*COMPLETED, "abort", "refused", "error", OPEN)
SHOWN_AT_MOST = 200
HEADINGS = {
    "request_id": "request", "arrival_s": "arrival (s)", "num_prompt_tokens": "prompt (tokens)",
    "num_output_tokens": "output (tokens)", "cached_tokens": "cached (tokens)", "queue_ms": "queue (ms)",
    "ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms)", "e2e_ms": "E2E (ms)", "preemptions": "preemptions",
    "recomputed_tokens": "recomputed (tokens)", "finish_reason": "ended",
}  # fmt: skip


def page(state: State) -> None:
    data = state.data()
    run_notes(data)
    window = data.within(state.window)
    engine = state.engine()
    _gantt(state, engine, choose(engine, _filter(window)), window)
    st.subheader("One request")
    _one(data)


def _filter(window: Window) -> Filter:
    keep("order", default="arrival", read=one_of(ORDERS))
    first, second, third, fourth = st.columns([2, 3, 2, 2], vertical_alignment="bottom")
    return Filter(
        window=window,
        order=first.selectbox("First", [*ORDERS], key="order"),
        reasons=tuple(second.multiselect("Ended with", REASONS, key="reasons", placeholder="any")),
        only_preempted=third.toggle("Only preempted ones", key="only_preempted"),
        limit=fourth.slider("At most", 10, SHOWN_AT_MOST, 40, step=10, key="limit"),
    )


def _gantt(state: State, data: RunData, chosen: Chosen, window: Window) -> None:
    if not len(chosen.rows):
        st.info("No request of this window passes the filter.")
        return
    shown = table(data, chosen.rows)
    time_chart(gantt(segments(data, chosen.rows), shown.request_id.tolist(), window), "gantt", state)
    st.caption(
        f"{counted(len(chosen.rows), 'request')} of {chosen.total:,} that touch the window and pass the filter. "
        "Queued: until first scheduled; prefill: until the first token; after a preemption recomputation counts to "
        "the phase that was interrupted. Latencies: TTFT = first_token - sent, TPOT = (last_token - first_token) / "
        "(output_tokens - 1), E2E = last_token - sent, queue = first_scheduled - queued."
    )
    st.dataframe(
        shown.rename(columns=HEADINGS),
        key="requests",
        hide_index=True,
        on_select=lambda: _take(shown),
        selection_mode="single-row",
    )


def _take(shown: pd.DataFrame) -> None:
    rows = st.session_state["requests"].selection.rows
    if rows:
        st.session_state["request"] = shown.request_id.iloc[rows[0]]


def _one(data: RunData) -> None:
    keep("request", default="")
    request_id = st.text_input("Request", key="request", placeholder="an id; or choose a row above")
    if not request_id:
        return
    if not data.has_engine:
        st.info("This run was not written by a scheduler: it cannot say why a request waited.")
        return
    try:
        told = story(data, request_id)
    except UnknownRequestError as e:
        st.error(str(e))
        return
    _tell(told)


def _tell(told: Story) -> None:
    names = [p.name if p.reason is None else f"{p.name}: {p.reason}" for p in told.phases]
    st.plotly_chart(where_time_went(names, [p.duration_ns / 1e6 for p in told.phases]), key="where_time_went")
    st.code("\n".join(lines(told)), language=None, wrap_lines=True)
