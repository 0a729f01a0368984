"""A run that is started here: its queue and KV cache while it goes on; it can be paused and stopped."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from servetwin.dashboard.charts import live as charts
from servetwin.dashboard.library import Library
from servetwin.dashboard.live_command import (
    CONSTANT,
    WALL_CLOCK,
    LiveChoices,
    arguments,
    as_typed,
    free_folder,
    presets,
)
from servetwin.dashboard.live_runs import LiveRun, LiveRuns
from servetwin.dashboard.state import State, keep, library
from servetwin.sim.runs import RunFolderError
from servetwin.sim.steptime.shipped import shipped_profiles

EVERY_S = 1.0
FILE = "a file or a run folder"
EXECUTORS = {
    CONSTANT: "constant: every step takes the same time",
    **{name: f"{name}: shipped profile" for name in shipped_profiles()},
    "roofline": "roofline: estimated for a model on a card",
    "torch": "torch: a real model, measured",
    WALL_CLOCK: "wall clock (--live): a real model, requests sent at their own times",
}
SPANS_S = {"last 30 s": 30.0, "last 2 min": 120.0, "last 10 min": 600.0, "all": None}
HONESTLY = (
    "A run whose step times are modelled is over in moments (some ten thousand requests a second): the pace holds it "
    "back so that one sees it, and changes nothing of what it does. The page shows what the run has written, a few "
    "times a second at first, then at every fiftieth part of its duration. A run started here ends with the dashboard."
)


@st.cache_resource
def live_runs() -> LiveRuns:
    """The runs of this server, whatever page or session started them."""
    return LiveRuns()


@st.cache_data(show_spinner="Asking for the presets")
def known_presets() -> dict[str, str]:
    return presets()


def page(state: State) -> None:
    runs = live_runs()
    with st.expander("Start a run", expanded=not runs.all()):
        _form(state, runs)
    if runs.all():
        _watch(runs)


def _form(state: State, runs: LiveRuns) -> None:
    st.caption(HONESTLY)
    chosen = _choices(state)
    try:
        words = arguments(chosen)
    except ValueError as e:
        st.error(str(e))
        return
    st.code(as_typed(words), language="bash", wrap_lines=True)
    if st.button("Start", key="live_start", type="primary"):
        runs.start(words, chosen.out)
        st.session_state["live_run"] = str(chosen.out)
        st.rerun()


def _choices(state: State) -> LiveChoices:
    known = known_presets()
    left, middle, right = st.columns(3)
    with left:
        st.markdown("**Load**")
        preset = st.selectbox("Workload", [*known, FILE], key="live_workload")
        if preset == FILE:
            workload = st.text_input("Path", key="live_path", help="A trace, our JSONL, or a run folder.")
        else:
            workload = preset
            st.caption(known[preset])
        num_prompts = st.number_input("Requests", 1, value=300, key="live_num_prompts")
        rate = st.number_input(
            "Rate (requests/s)", 0.01, value=None, placeholder="the workload's own", key="live_request_rate"
        )
        seed = st.number_input("Seed", 0, value=0, key="live_seed")
    with middle:
        st.markdown("**Steps**")
        executor = st.selectbox(
            "Step times", [*EXECUTORS], format_func=EXECUTORS.__getitem__, key="live_executor"
        )
        step_time_ms, model, gpu = 20.0, "", ""
        if executor == CONSTANT:
            step_time_ms = st.number_input("Step time (ms)", 0.001, value=20.0, key="live_step_time_ms")
        if executor in ("roofline", "torch", WALL_CLOCK):
            model = st.text_input("Model folder", key="live_model")
        if executor == "roofline":
            gpu = st.text_input("Card", "H100", key="live_gpu")
        pace = None
        if executor != WALL_CLOCK:
            pace = st.number_input(
                "Pace (simulated s per s)", 0.01, value=5.0, placeholder="as fast as it can", key="live_pace"
            )
    with right:
        st.markdown("**Engine**")
        seats = _count("Seats (max_num_seqs)", "live_max_num_seqs")
        budget = _count("Tokens per step (max_num_batched_tokens)", "live_max_num_batched_tokens")
        blocks = _count("KV-cache blocks", "live_num_gpu_blocks")
        more = st.text_input("More flags of servetwin run", key="live_more")
        free = str(free_folder(state.folders, [run.folder for run in live_runs().all()]))
        # Another name is another field: what one has typed goes with the run that it was for.
        out = st.text_input("Folder to write", free, key=f"live_out:{free}")
    return LiveChoices(
        workload=workload or "",
        executor=executor,
        out=Path(out),
        step_time_s=step_time_ms / 1e3,
        model=model,
        gpu=gpu,
        num_prompts=num_prompts,
        request_rate=rate,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        num_gpu_blocks=blocks,
        pace=pace,
        seed=seed,
        more=more,
    )


def _count(label: str, key: str) -> int | None:
    number: int | None = st.number_input(label, 1, value=None, placeholder="the engine's own", key=key)
    return number


def _watch(runs: LiveRuns) -> None:
    folders = [str(run.folder) for run in runs.all()]
    keep("live_run", "live")
    if st.session_state.get("live_run") not in folders:
        st.session_state["live_run"] = folders[0]
    left, right = st.columns([3, 1])
    chosen = left.selectbox("Run started here", folders, key="live_run")
    span = right.selectbox("Shown", [*SPANS_S], index=1, key="live_span")
    run = runs.get(Path(chosen))
    assert run is not None
    going_on = run.returncode is None
    st.fragment(_view, run_every=EVERY_S if going_on else None)(run, SPANS_S[span], going_on)


def _view(run: LiveRun, span_s: float | None, was_going_on: bool) -> None:
    """Shown anew every EVERY_S while it goes on."""
    if was_going_on and run.returncode is not None:
        st.rerun()
    _buttons(run)
    if run.returncode:
        st.error(f"servetwin run ended with exit code {run.returncode}:\n\n```\n{run.said().strip()}\n```")
    try:
        _show(library(), run, span_s)
    except RunFolderError as e:
        # The folder appears when the engine has been built.
        st.info("The run is being set up." if run.returncode is None else f"Nothing was written: {e}")


def _buttons(run: LiveRun) -> None:
    columns = st.columns([1, 1, 1, 3])
    alive = run.state in ("going on", "paused")
    columns[0].button("Pause", on_click=run.pause, disabled=run.state != "going on", key="live_pause")
    columns[1].button("Go on", on_click=run.resume, disabled=run.state != "paused", key="live_resume")
    columns[2].button("Stop", on_click=run.stop, disabled=not alive, key="live_stop")
    columns[3].markdown(f"**{run.state}**")


def _show(library: Library, run: LiveRun, span_s: float | None) -> None:
    data = library.open(run.folder)
    end_s = data.span_s[1]
    window = (0.0 if span_s is None else max(end_s - span_s, 0.0), end_s)
    steps = data.steps(window, charts.STEP_COLUMNS).frame
    ended = len(data.columns.numbers("requests", "finish_s"))
    latest = steps.iloc[-1] if len(steps) else None
    figures = {
        "Time of the run (s)": f"{end_s:,.1f}",
        "Running": "0" if latest is None else f"{latest.running:.0f}",
        "Waiting": "0" if latest is None else f"{latest.waiting:.0f}",
        "KV cache in use": "0.0%" if latest is None else f"{charts.used_fraction(latest):.1%}",
        "Requests ended": f"{ended:,}",
    }
    for column, (label, value) in zip(st.columns(len(figures)), figures.items(), strict=True):
        column.metric(label, value)
    if latest is not None:
        st.plotly_chart(charts.queue_and_kv(steps, window), key="live_chart")
    if run.returncode is not None:
        st.caption(f"`servetwin dash {run.folder}` shows all of it.")
