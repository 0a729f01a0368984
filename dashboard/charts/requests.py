"""Lives of requests as bars over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from servetwin.dashboard.charts.style import BLUE, GREY, ORANGE, RUN_TIME, VERMILION, laid_out

if TYPE_CHECKING:
    import pandas as pd

PHASES = {"queued": GREY, "prefill": ORANGE, "decode": BLUE, "preempted": VERMILION}
PATTERNS = {"queued": "", "prefill": "/", "decode": "", "preempted": "x"}
"""Beside the colours."""
BAR_PX = 14
AROUND_PX = 140


def gantt(segments: pd.DataFrame, order: Sequence[str], window: tuple[float, float]) -> go.Figure:
    """One line per request of `order`, from above; `segments`: request_id, phase, from_s, to_s."""
    figure = go.Figure()
    for phase, color in PHASES.items():
        mine = segments[(segments.phase == phase) & (segments.to_s > segments.from_s)]
        figure.add_bar(
            y=mine.request_id,
            x=mine.to_s - mine.from_s,
            base=mine.from_s,
            name=phase,
            orientation="h",
            marker={"color": color, "pattern": {"shape": PATTERNS[phase], "size": 4}},
            hovertemplate=f"%{{y}}: {phase}<br>from %{{base:.4f}} s for %{{x:.4f}} s<extra></extra>",
        )
    laid_out(figure, RUN_TIME, "request", height=AROUND_PX + BAR_PX * len(order))
    figure.update_yaxes(
        categoryorder="array", categoryarray=[*order][::-1], type="category", rangemode="normal"
    )
    if len(segments):
        low, high = float(segments.from_s.min()), float(segments.to_s.max())
        figure.update_xaxes(range=[max(low, window[0]), min(high, window[1])])
    return figure.update_layout(barmode="overlay", hovermode="closest", bargap=0.2)


def where_time_went(names: Sequence[str], durations_ms: Sequence[float]) -> go.Figure:
    """The phases of one request, a bar for each in order of first appearance; they add up to its life."""
    figure = go.Figure(
        go.Bar(
            y=[*names],
            x=[*durations_ms],
            orientation="h",
            marker_color=[_phase_color(name) for name in names],
            hovertemplate="%{y}: %{x:,.4g} ms<extra></extra>",
        )
    )
    laid_out(figure, "time (ms)", "", height=AROUND_PX + 2 * BAR_PX * len(names))
    figure.update_yaxes(autorange="reversed", type="category")
    return figure.update_layout(hovermode="closest")


def _phase_color(name: str) -> str:
    """The colours of the lines above: phases of a story are finer, and begin with these words."""
    words = {"waiting": "queued", "running": "prefill", "decoding": "decode", "preempted": "preempted"}
    return next((PHASES[phase] for word, phase in words.items() if name.startswith(word)), GREY)
