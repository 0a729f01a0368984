"""The dashboard's page: load, KV cache, latencies and throughput of one run, chosen among those it was given.

Started by `servetwin dash` (`dashboard/launch.py`) as `streamlit run app.py -- RUN...`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from servetwin.dashboard import charts
from servetwin.sim.metrics import DEFINITIONS, summarize
from servetwin.sim.runs import Run, RunFolderError, read_run

STATE_NOTES = {
    "running": "This run is still going on: figures cover what it has written so far.",
    "partial": "This run was cut short: figures cover what it had written.",
    "failed": "This run failed: figures cover what it had written.",
}
CACHED_RUNS = 8
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E", "queue": "queue time"}
NO_DATA = "no data"


@st.cache_resource(max_entries=CACHED_RUNS, show_spinner="Reading the run")
def opened(path: Path, version_ns: int) -> Run:
    """A run folder as of `version_ns`, the time of its last change: a new state is read anew."""
    del version_ns
    return read_run(path)


@st.cache_resource(max_entries=CACHED_RUNS)
def figures(path: Path, version_ns: int, metric_defs: str) -> dict[str, Any]:
    """The run's summary by a set of metric definitions."""
    return summarize(opened(path, version_ns), metric_defs)


def main(paths: list[Path]) -> None:
    st.set_page_config(page_title="servetwin", layout="wide")
    path = _chosen_run(paths)
    try:
        version_ns = (path / "run.json").stat().st_mtime_ns
        run = opened(path, version_ns)
        _page(run, figures(path, version_ns, _chosen_definitions()))
    except (OSError, RunFolderError) as e:
        st.error(f"{path} cannot be shown: {e}")


def _chosen_run(paths: list[Path]) -> Path:
    with st.sidebar:
        st.title("servetwin")
        if len(paths) == 1:
            st.caption(str(paths[0]))
            return paths[0]
        chosen: Path = st.selectbox("Run", paths, format_func=str, key="run")
        return chosen


def _chosen_definitions() -> str:
    with st.sidebar:
        chosen: str = st.selectbox(
            "Metric definitions",
            [*DEFINITIONS],
            index=[*DEFINITIONS].index("vllm-bench"),
            key="metric_defs",
            help="Tools mean different things by TTFT, TPOT, ITL and E2E; formulas stand below the table.",
        )
    return chosen


def _page(run: Run, summary: dict[str, Any]) -> None:
    _state(run)
    _key_figures(summary)
    st.subheader("Requests")
    st.plotly_chart(charts.requests_over_time(run.steps), key="requests")
    st.subheader("KV cache")
    st.plotly_chart(charts.kv_blocks_over_time(run.steps), key="kv_blocks")
    left, right = st.columns([2, 1])
    with left:
        _latencies(summary["servetwin"])
    with right:
        st.subheader("How requests ended")
        st.plotly_chart(charts.finish_reasons(summary["servetwin"]["requests"]), key="finish_reasons")


def _state(run: Run) -> None:
    if "execute" in run.config:
        st.info("Recorded plans were executed here without a scheduler: there are steps, but no requests.")
    if run.state == "complete":
        return
    if run.reason == "interrupted":
        st.warning("This run was interrupted: figures cover what it had written.")
        return
    reason = f" Reason: {run.reason}." if run.reason else ""
    st.warning(STATE_NOTES[run.state] + reason)
    if run.state == "running":
        st.button("Read again", key="read_again")


def _key_figures(summary: dict[str, Any]) -> None:
    ours = summary["servetwin"]
    figures = {
        "Completed requests": f"{summary['completed']} of {summary['completed'] + summary['failed']}",
        "Request throughput": _text(summary["request_throughput"], "/s"),
        "Output throughput": _text(summary["output_throughput"], " tokens/s"),
        "Median TTFT": _text(summary["median_ttft_ms"], " ms"),
        "Median TPOT": _text(summary["median_tpot_ms"], " ms"),
        "Preemptions": str(ours["preemptions"]),
        "Prefix hits": _percent(ours["prefix_hit_rate"]),
        "Peak KV use": _percent(ours["kv_peak_used_fraction"]),
    }
    columns = [*st.columns(len(figures) // 2), *st.columns(len(figures) // 2)]
    for column, (label, value) in zip(columns, figures.items(), strict=True):
        column.metric(label, value)


def _latencies(ours: dict[str, Any]) -> None:
    st.subheader("Latencies (ms)")
    table = pd.DataFrame({label: ours["latency"][f"{key}_ms"] for key, label in LATENCIES.items()}).T
    st.dataframe(table.astype(object).where(table.notna(), NO_DATA).map(_cell), key="latencies")
    lines = [f"- **{name}**: {formula}" for name, formula in ours["formulas"].items()]
    st.caption(
        f"{ours['metric_defs']}, completed requests, percentiles {ours['percentile_method']}:\n\n"
        + "\n".join(lines)
    )


def _cell(value: object) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}"


def _text(value: float | None, unit: str) -> str:
    return NO_DATA if value is None else f"{value:,.4g}{unit}"


def _percent(value: float | None) -> str:
    return NO_DATA if value is None else f"{value:.1%}"


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
