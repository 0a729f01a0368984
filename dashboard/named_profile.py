"""The step-time profile that the reader named on the page of step times, for other pages, too."""

from __future__ import annotations

import streamlit as st

from servetwin.dashboard.state import keep
from servetwin.sim.steptime.profiles import ProfileError, load_profile
from servetwin.sim.steptime.steps_profile import StepsProfile


def named_profile() -> StepsProfile | None:
    """None where none was named. Raises ProfileError for what is no profile of whole steps, OSError."""
    keep("profile", default="")
    name = st.session_state["profile"]
    if not name:
        return None
    profile = load_profile(name)
    if not isinstance(profile, StepsProfile):
        raise ProfileError(
            f"{name} has times of single kernels; `servetwin validate` compares those with a model's layers"
        )
    return profile
