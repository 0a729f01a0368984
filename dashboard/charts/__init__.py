"""Charts of a run: pure functions from its tables to Plotly figures, thinned to what a browser can draw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

if TYPE_CHECKING:
    import pandas as pd

MAX_POINTS = 4_000
"""Points per trace; more is slow in a browser and wider than any screen."""
RUN_TIME = "time of the run (s)"
COLORS = {
    "running": "#2563eb",
    "waiting": "#d97706",
    "used": "#2563eb",
    "cached, free": "#93c5fd",
    "free": "#e5e7eb",
}

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


def keep(x: Floats, series: Sequence[Floats], limit: int = MAX_POINTS) -> Indices:
    """Indices [<= about limit] that keep the shape of every series over x, the first and the last among them.

    All series get the same indices: stacked areas need common points.
    """
    if len(x) <= limit:
        return np.arange(len(x))
    chosen = [_pick(x, y, limit // len(series)) for y in series]
    return np.unique(np.concatenate([*chosen, np.array([0, len(x) - 1])]))


def _pick(x: Floats, y: Floats, limit: int) -> Indices:
    try:
        from tsdownsample import MinMaxLTTBDownsampler
    except ImportError:
        return min_max(y, limit)
    downsampler = MinMaxLTTBDownsampler()  # type: ignore[no-untyped-call]
    picked: Indices = downsampler.downsample(x, y, n_out=limit).astype(np.int64)
    return picked


def min_max(y: Floats, limit: int) -> Indices:
    """Indices of the smallest and the largest value in each of limit / 2 equal pieces of y, in order."""
    edges = np.linspace(0, len(y), limit // 2 + 1).astype(np.int64)
    pieces = list(pairwise(edges))
    lows = [start + int(y[start:stop].argmin()) for start, stop in pieces]
    highs = [start + int(y[start:stop].argmax()) for start, stop in pieces]
    return np.unique(np.array(lows + highs, dtype=np.int64))


def requests_over_time(steps: pd.DataFrame) -> go.Figure:
    """Running and waiting requests after each schedule call."""
    return _step_chart(steps, {"running": "running", "waiting": "waiting"}, "requests")


def kv_blocks_over_time(steps: pd.DataFrame) -> go.Figure:
    """The usable KV blocks, stacked: in use, free with content that can be hit, free."""
    columns = {"used": "used_blocks", "cached, free": "cached_free_blocks", "free": "free_blocks"}
    return _step_chart(steps, columns, "KV-cache blocks", stacked=True)


def finish_reasons(counts: dict[str, int]) -> go.Figure:
    """How requests ended, as bars."""
    figure = go.Figure(go.Bar(x=list(counts), y=list(counts.values()), marker_color=COLORS["running"]))
    return _laid_out(figure, "finish reason", "requests")


def _step_chart(
    steps: pd.DataFrame, columns: dict[str, str], y_title: str, *, stacked: bool = False
) -> go.Figure:
    """One trace per column; a count holds from its schedule call to the next, so lines are steps."""
    x = steps.start_s.to_numpy(dtype=np.float64)
    series = {name: steps[column].to_numpy(dtype=np.float64) for name, column in columns.items()}
    kept = keep(x, list(series.values()))
    figure = go.Figure()
    for name, y in series.items():
        figure.add_scatter(
            x=x[kept],
            y=y[kept],
            name=name,
            mode="lines",
            line={"shape": "hv", "width": 0.5 if stacked else 1.5, "color": COLORS[name]},
            stackgroup="blocks" if stacked else None,
        )
    return _laid_out(figure, RUN_TIME, y_title)


def _laid_out(figure: go.Figure, x_title: str, y_title: str) -> go.Figure:
    figure.update_layout(
        xaxis_title=x_title,
        yaxis={"title": y_title, "rangemode": "tozero"},
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        legend={"orientation": "h", "y": 1.1},
        hovermode="x unified",
        height=320,
    )
    return figure
