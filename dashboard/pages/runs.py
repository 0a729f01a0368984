"""All runs: how each went, and in what they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from servetwin.dashboard.library import version_of
from servetwin.dashboard.run_list import COLUMNS, described, differences, row_of
from servetwin.dashboard.state import State
from servetwin.sim.runs import RunFolderError, read_run

JUDGED = 100
"""Runs that get a verdict: it takes a look at all of their requests."""
COMPARED_FIRST = 4
"""Runs whose configurations are compared before anybody has chosen."""


def page(state: State) -> None:
    rows = [_row(path, _version(path), n < JUDGED) for n, path in enumerate(state.runs)]
    table = pd.DataFrame(rows, columns=[*COLUMNS]).rename(columns=COLUMNS)
    table.insert(0, "run", [state.label(path) for path in state.runs])
    st.dataframe(
        table,
        key="runs",
        hide_index=True,
        on_select=lambda: _look_at(state),
        selection_mode="single-row",
        column_config={
            name: st.column_config.NumberColumn(format="%.4g") for name in COLUMNS.values() if "(" in name
        },
    )
    st.caption(
        "Choose a row to look at that run on all pages. Latencies by the definitions that the run was started with. "
        "Verdict: overloaded, where the queue grows in proportion to time; backlogged, where the number present has "
        "not settled (by MSER-5); else stable."
    )
    _configurations(state)


@st.cache_data(max_entries=2_000, show_spinner=False)
def _row(path: Path, version_ns: int, judged: bool) -> dict[str, Any]:
    del version_ns  # a part of the key
    return row_of(path, judged=judged)


def _version(path: Path) -> int:
    try:
        return version_of(path)
    except (RunFolderError, OSError):
        return 0


def _look_at(state: State) -> None:
    rows = st.session_state["runs"].selection.rows
    if rows:
        st.session_state["run"] = state.runs[rows[0]]


def _configurations(state: State) -> None:
    st.subheader("Where their configurations differ")
    names = {state.label(path): path for path in state.runs}
    chosen = st.multiselect("Runs", [*names], default=[*names][:COMPARED_FIRST], key="compared_runs")
    described_runs = {}
    for name in chosen:
        try:
            described_runs[name] = described(read_run(names[name]))
        except (RunFolderError, OSError) as e:
            st.error(f"This cannot be shown: {e}")
    if len(described_runs) < 2:
        st.caption("Choose two runs or more.")
        return
    table = differences(described_runs)
    if table.empty:
        st.caption("These runs have the same workload and configuration.")
    else:
        st.dataframe(table, key="differences")
