"""Queue and KV cache of a run that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from servetwin.dashboard.charts.style import BLUE, GREY, ORANGE, RUN_TIME, SKY, laid_out
from servetwin.dashboard.charts.thinning import keep

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS = ("start_s", "running", "waiting", "used_blocks", "cached_free_blocks", "free_blocks")
SERIES = {
    "running": ("running", 1, BLUE, "solid"),
    "waiting": ("waiting", 1, ORANGE, "dash"),
    "used_blocks": ("used", 2, BLUE, "solid"),
    "cached_free_blocks": ("cached, free", 2, SKY, "solid"),
    "free_blocks": ("free", 2, GREY, "solid"),
}
"""Column of steps/ -> name, panel, colour, dash."""


def queue_and_kv(steps: pd.DataFrame, window: tuple[float, float]) -> go.Figure:
    """Two panels over the last stretch of time: running and waiting requests; KV blocks, stacked."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    x = steps.start_s.to_numpy(dtype=np.float64)
    values = {column: steps[column].to_numpy(dtype=np.float64) for column in SERIES}
    kept = keep(x, [*values.values()])
    for column, (name, row, color, dash) in SERIES.items():
        figure.add_scatter(
            x=x[kept],
            y=values[column][kept],
            name=name,
            mode="lines",
            line={"shape": "hv", "width": 1.5 if row == 1 else 0.5, "color": color, "dash": dash},
            stackgroup=None if row == 1 else "blocks",
            row=row,
            col=1,
        )
    laid_out(figure, "", "requests", height=460)
    figure.update_yaxes(title="KV-cache blocks", rangemode="tozero", row=2, col=1)
    return figure.update_xaxes(title=RUN_TIME, range=list(window), row=2, col=1)


def used_fraction(step: pd.Series[float]) -> float:
    """Of the usable blocks, those that requests hold."""
    usable = step.used_blocks + step.cached_free_blocks + step.free_blocks
    return float(step.used_blocks / usable) if usable else 0.0
