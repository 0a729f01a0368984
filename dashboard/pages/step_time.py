"""The step-time model: times of steps against what a profile foretells for them, and where it was never measured."""

from __future__ import annotations

import numpy as np
import streamlit as st

from servetwin.dashboard.charts import step_time as charts
from servetwin.dashboard.named_profile import named_profile
from servetwin.dashboard.notes import run_notes
from servetwin.dashboard.run_data import RunData
from servetwin.dashboard.state import State, keep, time_chart
from servetwin.dashboard.step_times import (
    Foretold,
    StepTimes,
    by_regime,
    coverage,
    errors,
    foretell,
    step_times,
)
from servetwin.dashboard.words import counted, percent
from servetwin.sim.steptime.profiles import ProfileError
from servetwin.sim.steptime.shipped import shipped_profiles
from servetwin.sim.steptime.steps_profile import StepsProfile

MEANING = (
    "Prefill: steps of prompts alone; decode: of decode rows alone; mixed: both. Time on the device: forward and "
    "sampling, as `device_s` of steps/."
)


def page(state: State) -> None:
    data = state.data()
    run_notes(data)
    times = step_times(state.one_engine(), data.within(state.window))
    _source(data)
    if not len(times):
        st.info("No step of this window has tokens and a noted shape.")
        return
    st.plotly_chart(
        charts.against_tokens(times.new_tokens, times.device_ms, times.regimes), key="against_tokens"
    )
    st.dataframe(by_regime(times), key="by_regime")
    behind = (
        f" {counted(times.left_out, 'more step')} of the window left out: choose a shorter one."
        if times.left_out
        else ""
    )
    st.caption(MEANING + behind)
    st.subheader("Foretold against the run")
    profile = _profile()
    foretold = _foretold(times, profile)
    if foretold is not None:
        _compared(state, times, foretold)
    if profile is not None:
        _about(times, profile)


def _source(data: RunData) -> None:
    source = data.run.header.get("step_time_source") or "unknown"
    outside = data.summary["servetwin"].get("predicted_outside_steps") or 0
    steps = data.summary["servetwin"]["steps"]
    st.markdown(f"Step times of this run: **{source}**.")
    if error := data.run.header.get("step_time_error"):
        st.caption(str(error))
    if outside:
        st.warning(
            f"{counted(outside, 'step')} of {steps:,} ({percent(outside / steps)}) lay outside the region that the "
            "source was measured on."
        )


def _profile() -> StepsProfile | None:
    keep("profile", default="")
    st.text_input(
        "Profile",
        key="profile",
        placeholder=", ".join(shipped_profiles()),
        help="A file of `servetwin fit`, or the name of a shipped profile; its model must be that of the run.",
    )
    try:
        return named_profile()
    except (ProfileError, OSError) as e:
        st.error(f"This cannot be shown: {e}")
        return None


def _foretold(times: StepTimes, profile: StepsProfile | None) -> Foretold | None:
    if profile is not None:
        return foretell(profile.step_model(), times)
    if not np.isnan(times.logged_ms).any():
        return Foretold(times.logged_ms, times.outside)
    st.info("Name a profile to see what it foretells for these steps.")
    return None


def _compared(state: State, times: StepTimes, foretold: Foretold) -> None:
    left, right = st.columns(2)
    inside = 1 - float(foretold.outside.mean())
    left.metric("Steps inside the measured region", percent(inside))
    right.metric("Outside", f"{int(foretold.outside.sum()):,} of {len(times):,}")
    regimes, residual = times.regimes, foretold.residual_percent(times)
    st.dataframe(errors(times, foretold), key="errors")
    st.caption(
        "Errors in percent of the run's own time, absolute; bias: mean signed error, above 0 where too long."
    )
    st.plotly_chart(
        charts.against_foretold(times.device_ms, foretold.device_ms, regimes), key="against_foretold"
    )
    time_chart(charts.residuals_over_time(times.start_s, residual, regimes), "residuals", state)
    st.plotly_chart(charts.residual_histogram(residual, regimes), key="residual_histogram")


def _about(times: StepTimes, profile: StepsProfile) -> None:
    st.subheader("What the profile was measured on")
    st.dataframe(coverage(times, profile.coverage), key="coverage")
    st.caption(profile.describe_error())
    st.json(profile.about, expanded=False)
