"""Lives of requests as bars over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from servetwin.dashboard.charts.style import BLUE, GREY, ORANGE, PALETTE, RUN_TIME, VERMILION, laid_out

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
    """The phases of one request as one bar."""
    figure = go.Figure()
    for n, (name, duration) in enumerate(zip(names, durations_ms, strict=True)):
        color = PALETTE[n % len(PALETTE)]
        figure.add_bar(y=["its time"], x=[duration], name=name, orientation="h", marker={"color": color})
    laid_out(figure, "time (ms)", "", height=190)
    return figure.update_layout(barmode="stack", hovermode="closest")
