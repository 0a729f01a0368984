"""The dashboard: chooses what to look at, finds the page and shows it.

Started by `servetwin dash` (`dashboard/launch.py`) through `entry/streamlit_app.py`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from time import monotonic

import streamlit as st

from servetwin.dashboard.folders import runs_of
from servetwin.dashboard.pages import FIRST_PAGE, PAGES
from servetwin.dashboard.state import State, choose, publish, refresh_while_running
from servetwin.sim.runs import RunFolderError

FOLDERS_TTL_S = 2.0


@st.cache_data(ttl=FOLDERS_TTL_S, show_spinner=False)
def found(folders: tuple[Path, ...]) -> list[Path]:
    """Runs that are there now: new ones appear without a restart."""
    return runs_of(folders)


def main(folders: list[Path]) -> None:
    st.set_page_config(page_title="servetwin", layout="wide")
    state = choose(folders, found(tuple(folders)))
    pages = [
        st.Page(partial(show, name, state), title=title, url_path=name, default=name == FIRST_PAGE)
        for name, title in PAGES.items()
    ]
    st.navigation(pages).run()
    publish()


def show(name: str, state: State) -> None:
    """One page; what cannot be read is one message on it, and the rest of the app lives on."""
    begun = monotonic()
    page = import_module(f"servetwin.dashboard.pages.{name}")
    st.title(PAGES[name])
    try:
        page.page(state)
    except (OSError, RunFolderError) as e:
        st.error(f"This cannot be shown: {e}")
        return
    if state.path is not None:
        try:
            refresh_while_running(state.data(), monotonic() - begun)
        except (OSError, RunFolderError):
            return
