"""Two runs: what changed from one to the other, request by request, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import streamlit as st

from servetwin.dashboard.charts import compare as charts
from servetwin.dashboard.compared import LATENCIES, PAIRS_AT_ONCE, Compared, compare, num_requests
from servetwin.dashboard.library import version_of
from servetwin.dashboard.run_list import ABSENT
from servetwin.dashboard.state import State, keep
from servetwin.dashboard.words import NO_DATA
from servetwin.sim.comparison import Difference
from servetwin.sim.runs import read_run

KEPT_COMPARISONS = 4


def page(state: State) -> None:
    if state.path is None or len(state.runs) < 2:
        st.info("Two runs are needed: `servetwin dash RUN RUN`, or a folder with several runs below it.")
        return
    other = _other(state, state.path)
    st.markdown(f"**A** {state.label(state.path)} (chosen in the sidebar) against **B** {state.label(other)}")
    intervals = _wants_intervals(state, other)
    found = _compared(
        state.path, version_of(state.path), other, version_of(other), state.metric_defs, intervals
    )
    for note in found.notes:
        st.warning(note)
    st.caption(f"{found.num_pairs:,} pairs of requests that completed in both runs, by their ids")
    _changes(found)
    _tables(found)
    _configuration(found)


@st.cache_resource(max_entries=KEPT_COMPARISONS, show_spinner="Comparing")
def _compared(a: Path, a_ns: int, b: Path, b_ns: int, metric_defs: str, intervals: bool) -> Compared:
    del a_ns, b_ns  # parts of the key
    return compare(read_run(a), read_run(b), metric_defs, intervals=intervals)


def _other(state: State, first: Path) -> Path:
    """B; the first of the other runs unless chosen, and kept in the link."""
    others = {str(path): path for path in state.runs if path != first}
    keep("other_run", "other")
    if st.session_state.get("other_run") not in others:
        st.session_state["other_run"] = next(iter(others))
    chosen = st.selectbox("Run B", [*others], format_func=lambda p: state.label(others[p]), key="other_run")
    return others[chosen]


def _wants_intervals(state: State, other: Path) -> bool:
    """At once for runs of usual size; the resamples of a million pairs take a minute."""
    assert state.path is not None
    sizes = [num_requests(read_run(path)) for path in (state.path, other)]
    if min(sizes) <= PAIRS_AT_ONCE:
        return True
    chosen: bool = st.toggle(
        "Intervals",
        key="compare_intervals",
        help="Bootstrap over blocks of requests: about a minute for a million.",
    )
    return chosen


def _changes(found: Compared) -> None:
    st.subheader("How much changed")
    st.plotly_chart(charts.forest({**found.latencies, **found.figures}), key="forest")
    words = "\n".join(f"- **{label}**: {found.formulas[name]}" for name, label in LATENCIES.items())
    st.caption(
        "Bars: 95 % intervals of a paired bootstrap over blocks of consecutive requests (latencies only; figures of a "
        f"run as a whole have none).\n\n{words}"
    )
    quantiles = {LATENCIES[name]: values for name, values in found.quantiles.items()}
    st.subheader("Latencies of A and B")
    st.plotly_chart(charts.both_cdfs(quantiles), key="both_cdfs")
    st.subheader("Change of each request")
    st.plotly_chart(charts.changes(quantiles), key="changes")
    st.caption("Left of 0: requests that were faster in B.")


def _tables(found: Compared) -> None:
    st.subheader("Figures")
    left, right = st.columns(2)
    left.dataframe(_table(found.latencies), key="compared_latencies", hide_index=True)
    right.dataframe(_table(found.figures), key="compared_figures", hide_index=True)


def _table(differences: Mapping[str, Difference]) -> pd.DataFrame:
    rows = []
    for name, d in differences.items():
        low_high = "" if d.interval is None else f"{d.interval.low:+,.4g} to {d.interval.high:+,.4g}"
        unit = "" if d.name.unit == "1" else d.name.unit
        rows.append(
            (name, unit, _number(d.a), _number(d.b), _signed(d.delta), low_high, _signed(d.delta_percent))
        )
    return pd.DataFrame(rows, columns=["figure", "unit", "A", "B", "B - A", "95 % interval", "%"])


def _configuration(found: Compared) -> None:
    st.subheader("Configuration")
    if not found.configuration:
        st.caption("The configurations are equal.")
        return
    rows = [
        (name, *(ABSENT if v is None else str(v) for v in pair)) for name, pair in found.configuration.items()
    ]
    st.dataframe(
        pd.DataFrame(rows, columns=["field", "A", "B"]), key="compared_configuration", hide_index=True
    )


def _number(value: float | None) -> str:
    return NO_DATA if value is None else f"{value:,.6g}"


def _signed(value: float | None) -> str:
    return NO_DATA if value is None else f"{value:+,.4g}"
