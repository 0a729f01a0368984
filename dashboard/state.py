"""What one looks at: run, window of time, metric definitions. Chosen in the sidebar, kept in the link.

A page gets one `State` and reads everything through it. Streamlit drops the query of the address when another page
is opened, so the choices live in the session and are written back to the address on every page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from servetwin.dashboard.folders import labels
from servetwin.dashboard.library import Library, version_of
from servetwin.dashboard.run_data import RunData, Window
from servetwin.sim.metrics import DEFINITIONS
from servetwin.sim.runs import RunFolderError

if TYPE_CHECKING:
    import plotly.graph_objects as go

DEFAULT_DEFINITIONS = "vllm-bench"
ALL_REPLICAS = "all"
REFRESH_S, PAUSE = 2.0, 4.0
"""How often a run that is still being written is looked after, and how many times as long as a page took at least."""
KEPT = {"run": "run", "from_s": "from", "to_s": "to", "metric_defs": "defs"}
"""Keys of the session -> names in the link. A page that wants its own choices in the link calls `keep`."""


@dataclass(frozen=True)
class State:
    """The choices of one session, as every page gets them."""

    folders: tuple[Path, ...]
    """As given on the command line."""
    runs: tuple[Path, ...]
    """All that can be chosen; some may turn out to be no run."""
    path: Path | None
    """The chosen run; None where there is none at all."""
    window: Window | None
    """From and to in s of the run; None: the whole run."""
    metric_defs: str
    replica: int | None = None
    """The chosen one of several; None: all."""

    def engine(self) -> RunData:
        """The chosen run, as far as it happened at the chosen replica."""
        data = self.data()
        several = self.replica in data.replicas and len(data.replicas) > 1
        return data.of_replica(self.replica) if several and self.replica is not None else data

    def one_engine(self) -> RunData:
        """The same for what makes sense at one replica only: the first one where none was chosen."""
        data = self.engine()
        if len(data.replicas) < 2:
            return data
        st.caption(f"Replica {data.replicas[0]} of {len(data.replicas)}; the sidebar has the others.")
        return data.of_replica(data.replicas[0])

    def data(self, path: Path | None = None) -> RunData:
        """The chosen run, or another one. Raises RunFolderError or OSError, which the app shows as a message."""
        chosen = path or self.path
        if chosen is None:
            raise RunFolderError("no run to show: `servetwin run WORKLOAD --out DIR` writes one")
        return library().open(chosen)

    def label(self, path: Path) -> str:
        """A short name of a run."""
        return labels(self.runs).get(path, str(path))


@st.cache_resource
def library() -> Library:
    """The open runs, one set for all sessions."""
    return Library()


def keep(key: str, name: str | None = None, default: Any = None, read: Callable[[str], Any] = str) -> None:
    """Keeps a widget's value over pages and in the link; call it before the widget with this key is made.

    `read` makes a value of what the link says, and raises ValueError where that is nonsense: the default then.
    """
    name = name or key
    kept = st.session_state.setdefault("kept", {})
    if key not in st.session_state:
        # A widget's own state is gone once a page without it was shown.
        value = kept[key] if key in kept else _given(name, default, read)
        if value is not None:
            st.session_state[key] = value
    kept[key] = st.session_state.get(key)
    st.session_state.setdefault("names", dict(KEPT))[key] = name


def _given(name: str, default: Any, read: Callable[[str], Any]) -> Any:
    text = st.session_state["given"].get(name)
    try:
        return default if text is None else read(text)
    except ValueError:
        return default


def positive(text: str) -> float:
    """A number above 0 in a link."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def one_of(allowed: Collection[str]) -> Callable[[str], str]:
    """One of these words in a link."""

    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(text)
        return text

    return read


def choose(folders: Sequence[Path], runs: Sequence[Path]) -> State:
    """The sidebar. Restores the choices of a link when a session begins."""
    if "given" not in st.session_state:
        _restore(runs)
    if st.session_state.get("run") not in runs:
        st.session_state["run"] = runs[0] if runs else None
    with st.sidebar:
        names = labels(runs)
        st.selectbox("Run", runs, format_func=lambda run: names.get(run, str(run)), key="run")
        left, right = st.columns(2)
        left.number_input("From (s)", key="from_s", min_value=0.0, value=None, placeholder="start")
        right.number_input("To (s)", key="to_s", min_value=0.0, value=None, placeholder="end")
        st.button("Whole run", key="whole_run", on_click=_zoom_out, disabled=_window() is None)
        if _window() is None and st.session_state["from_s"] is not None:
            st.warning("From is not before To: the whole run is shown.")
        _choose_replica(st.session_state["run"])
        st.selectbox(
            "Metric definitions",
            [*DEFINITIONS],
            key="metric_defs",
            help="Tools mean different things by TTFT, TPOT, ITL and E2E; the formulas stand beside the numbers.",
        )
    return State(
        tuple(folders),
        tuple(runs),
        st.session_state["run"],
        _window(),
        st.session_state["metric_defs"],
        _replica(),
    )


def _choose_replica(path: Path | None) -> None:
    """Only where a run has several; whatever is wrong with the run is told on the page."""
    try:
        replicas = [] if path is None else library().open(path).replicas
    except (OSError, RunFolderError):
        return
    if len(replicas) < 2:
        return
    names = [ALL_REPLICAS, *map(str, replicas)]
    keep("replica", default=ALL_REPLICAS)
    if st.session_state.get("replica") not in names:
        st.session_state["replica"] = ALL_REPLICAS
    st.selectbox("Replica", names, key="replica")


def _replica() -> int | None:
    chosen = st.session_state.get("replica", ALL_REPLICAS)
    return None if chosen == ALL_REPLICAS else int(chosen)


def publish() -> None:
    """Writes the choices into the address; called when the page is done."""
    names: dict[str, str] = st.session_state.get("names", KEPT)
    kept: dict[str, Any] = st.session_state.get("kept", {})
    values = {name: st.session_state.get(key, kept.get(key)) for key, name in names.items()}
    # What a link says for pages that were not opened yet waits for them.
    waiting = {name: text for name, text in st.session_state["given"].items() if name not in values}
    query = waiting | {name: _text(value) for name, value in values.items() if value not in (None, "")}
    if query != st.query_params.to_dict():
        st.query_params.from_dict(query)


def time_chart(figure: go.Figure, key: str, state: State) -> None:
    """A chart over the time of the run: a box drawn in it becomes the window of all charts."""
    # Another window is another chart, or the box would stay in it.
    key = f"{key}:{state.window}"
    figure.update_layout(dragmode="select", selectdirection="h")
    st.plotly_chart(figure, key=key, on_select=partial(_zoom_to_box, key), selection_mode="box")


def refresh_while_running(data: RunData, page_s: float) -> None:
    """Shows the page anew once a run that is being written has more to show.

    `page_s`: how long the page took; one that takes long is shown less often.
    """
    if data.run.state == "running":
        st.fragment(_look_after, run_every=max(REFRESH_S, PAUSE * page_s))(data)


def _look_after(data: RunData) -> None:
    st.caption("This page follows the run.")
    if version_of(data.run.path) != data.version_ns or data.run.state != "running":
        st.rerun()


def _restore(runs: Sequence[Path]) -> None:
    query = st.session_state["given"] = st.query_params.to_dict()
    wanted = query.get("run")
    chosen = [run for run in runs if str(run) == wanted]
    if wanted is not None and not chosen:
        st.warning(f"The run of this link is not among those of this dashboard: {wanted}")
    defs = query.get("defs", DEFAULT_DEFINITIONS)
    st.session_state["run"] = chosen[0] if chosen else runs[0] if runs else None
    st.session_state["from_s"], st.session_state["to_s"] = (
        _seconds(query.get("from")),
        _seconds(query.get("to")),
    )
    st.session_state["metric_defs"] = defs if defs in DEFINITIONS else DEFAULT_DEFINITIONS


def _window() -> Window | None:
    low, high = st.session_state.get("from_s"), st.session_state.get("to_s")
    if low is None and high is None:
        return None
    low, high = low or 0.0, math.inf if high is None else high
    return (low, high) if low < high else None


def _zoom_to_box(key: str) -> None:
    boxes = st.session_state[key].selection.box
    if boxes:
        low, high = sorted(boxes[0]["x"])
        if low < high:
            st.session_state["from_s"], st.session_state["to_s"] = max(float(low), 0.0), max(float(high), 0.0)


def _zoom_out() -> None:
    st.session_state["from_s"] = st.session_state["to_s"] = None


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text) if text is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
