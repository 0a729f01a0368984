"""What a reader must know about a run before its figures."""

from __future__ import annotations

import streamlit as st

from servetwin.dashboard.caveats import EXECUTED, state_note
from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.step_view import StepView
from servetwin.dashboard.words import counted


def run_notes(data: RunData) -> None:
    """State, reason, and what kind of run it is where that is not the usual one."""
    run = data.run
    if "execute" in run.config:
        st.info(EXECUTED)
    if note := state_note(run):
        st.warning(note)


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
