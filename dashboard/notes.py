"""What a reader must know about a run before its figures."""

from __future__ import annotations

import streamlit as st

from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.step_view import StepView
from servetwin.dashboard.words import counted

STATES = {
    "running": "This run is still going on: figures cover what it has written so far.",
    "partial": "This run was cut short: figures cover what it had written.",
    "failed": "This run failed: figures cover what it had written.",
}


def run_notes(data: RunData) -> None:
    """State, reason, and what kind of run it is where that is not the usual one."""
    run = data.run
    if "execute" in run.config:
        st.info("Recorded plans were executed here without a scheduler: there are steps, but no requests.")
    if run.state == "complete":
        return
    if run.reason == "interrupted":
        st.warning("This run was interrupted: figures cover what it had written.")
        return
    st.warning(STATES[run.state] + (f" Reason: {run.reason}." if run.reason else ""))


def drawn_from(view: StepView, hint: str = "") -> None:
    """How much stands behind a chart over the steps of a window."""
    rows = (
        ""
        if view.exact
        else f", drawn from {counted(len(view.frame), 'point')}; a shorter window shows every one"
    )
    st.caption(
        f"{counted(view.num_steps, 'step')}{rows}. Charts keep the extremes of what they leave out. {hint}"
    )
