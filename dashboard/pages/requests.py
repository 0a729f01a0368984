"""Page."""

from __future__ import annotations

from servetwin.dashboard.notes import run_notes
from servetwin.dashboard.state import State


def page(state: State) -> None:
    run_notes(state.data())
