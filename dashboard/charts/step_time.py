"""Step times: against tokens, against what was foretold, and how wrong that was."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from servetwin.dashboard.charts.style import BLUE, GREY, ORANGE, RUN_TIME, VERMILION, laid_out
from servetwin.dashboard.charts.thinning import Floats, Indices

REGIMES = {"prefill": (ORANGE, "triangle-up"), "decode": (BLUE, "circle"), "mixed": (VERMILION, "x")}
POINTS = 1_500
"""Of each regime: the extremes of every stretch, so that no outlier is lost."""


def against_tokens(new_tokens: Floats, times_ms: Floats, regimes: Floats) -> go.Figure:
    """Time on the device of each step over its tokens."""
    figure = _scatter(new_tokens, times_ms, regimes, times_ms)
    return laid_out(figure, "tokens of the step", "time on the device (ms)").update_layout(
        hovermode="closest"
    )


def against_foretold(own_ms: Floats, foretold_ms: Floats, regimes: Floats) -> go.Figure:
    """What was foretold over the run's own times; on the line both are equal."""
    figure = _scatter(own_ms, foretold_ms, regimes, foretold_ms / own_ms)
    ends = [float(own_ms.min()), float(own_ms.max())] if len(own_ms) else [0.0, 1.0]
    figure.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": GREY, "dash": "dash"})
    laid_out(figure, "time of the run (ms)", "foretold (ms)")
    return figure.update_layout(hovermode="closest")


def residuals_over_time(start_s: Floats, residual_percent: Floats, regimes: Floats) -> go.Figure:
    """How wrong each step was foretold, over the run: drifts and outliers show."""
    figure = _scatter(start_s, residual_percent, regimes, residual_percent)
    laid_out(figure, RUN_TIME, "foretold against the run (%)")
    return figure.update_layout(hovermode="closest").update_yaxes(rangemode="normal")


def residual_histogram(residual_percent: Floats, regimes: Floats) -> go.Figure:
    """How many steps were foretold how wrongly, by regime."""
    figure = go.Figure()
    low, high = np.percentile(residual_percent, (0.5, 99.5)) if len(residual_percent) else (-1.0, 1.0)
    edges = np.linspace(low, max(high, low + 1e-6), 61)
    for regime, (color, _) in REGIMES.items():
        mine = residual_percent[regimes == regime]
        if len(mine):
            counts, _ = np.histogram(np.clip(mine, edges[0], edges[-1]), bins=edges)
            figure.add_bar(
                x=(edges[:-1] + edges[1:]) / 2, y=counts, name=regime, marker_color=color, opacity=0.7
            )
    laid_out(figure, "foretold against the run (%)", "steps", height=280)
    return figure.update_layout(barmode="overlay", bargap=0)


def _scatter(x: Floats, y: Floats, regimes: Floats, extremes_of: Floats) -> go.Figure:
    figure = go.Figure()
    for regime, (color, symbol) in REGIMES.items():
        mine = np.flatnonzero(regimes == regime)
        if not len(mine):
            continue
        shown = mine[_spread(x[mine], extremes_of[mine])]
        figure.add_scatter(
            x=x[shown],
            y=y[shown],
            mode="markers",
            name=regime,
            marker={"color": color, "symbol": symbol, "size": 5, "opacity": 0.6},
        )
    return figure


def _spread(x: Floats, y: Floats) -> Indices:
    """About POINTS places over the range of x, among them the least and the greatest y of every stretch of it."""
    if len(x) <= POINTS:
        return np.arange(len(x))
    order = np.lexsort((y, x))
    pieces = np.array_split(order, POINTS // 3)
    kept = [[p[0], p[len(p) // 2], p[-1], p[np.argmin(y[p])], p[np.argmax(y[p])]] for p in pieces]
    return np.unique(np.array(kept))
