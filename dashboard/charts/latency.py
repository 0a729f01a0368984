"""Latencies as distributions, and how many requests keep limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from servetwin.dashboard.charts.style import BLUE, GREY, ORANGE, PALETTE, RUN_TIME, VERMILION, laid_out
from servetwin.dashboard.charts.thinning import Floats

if TYPE_CHECKING:
    from servetwin.sim.metrics import Distribution

QUANTILES = 500
TAIL = (0.999, 0.9999)
COLUMNS = 3
PANEL_PX = 280


def cdfs(named: Mapping[str, Distribution], limits_ms: Mapping[str, float] | None = None) -> go.Figure:
    """The share of samples up to each latency, a panel for each name; a limit is a line. Distributions in ns."""
    drawn = {name: d for name, d in named.items() if d.count}
    rows = max(-(-len(drawn) // COLUMNS), 1)
    figure = make_subplots(rows=rows, cols=COLUMNS, vertical_spacing=0.35 / rows)
    for n, (name, distribution) in enumerate(drawn.items()):
        place = {"row": n // COLUMNS + 1, "col": n % COLUMNS + 1}
        values, shares = _quantiles(distribution)
        figure.add_scatter(
            x=values / 1e6,
            y=100 * shares,
            mode="lines",
            name=name,
            # Between two samples the share does not rise.
            line={"color": PALETTE[n % len(PALETTE)], "shape": "hv"},
            hovertemplate="%{y:.2f} % up to %{x:.4g} ms<extra></extra>",
            **place,
        )
        if limits_ms and name in limits_ms:
            figure.add_vline(x=limits_ms[name], line={"color": VERMILION, "dash": "dash"}, **place)
        figure.update_yaxes(title="samples (%)" if n % COLUMNS == 0 else "", range=[0, 101], **place)
        figure.update_xaxes(title=f"{name} (ms)", **place)
    return figure.update_layout(
        height=PANEL_PX * rows, showlegend=False, margin={"l": 10, "r": 10, "t": 30, "b": 10}
    )


def attainment_curve(factors: Floats, shares: Floats) -> go.Figure:
    """The share of requests within all limits, were these wider or narrower; 1 is what they are."""
    figure = go.Figure(
        go.Scatter(
            x=factors,
            y=100 * shares,
            mode="lines",
            line={"color": BLUE},
            hovertemplate="limits x %{x:.3g}: %{y:.2f} %<extra></extra>",
        )
    )
    figure.add_vline(x=1, line={"color": VERMILION, "dash": "dash"})
    laid_out(figure, "all limits times", "requests within all limits (%)")
    return figure.update_xaxes(type="log").update_yaxes(range=[0, 101])


def attainment_over_time(begins_s: Floats, came: Sequence[float] | Floats, shares: Floats) -> go.Figure:
    """By time of arrival: how many came, and how many of them got what was promised."""
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    figure.add_bar(x=begins_s, y=came, name="arrivals", marker_color=GREY, opacity=0.5, offset=0)
    figure.add_scatter(
        x=begins_s,
        y=100 * np.asarray(shares),
        name="within all limits",
        mode="lines+markers",
        marker={"size": 4},
        line={"color": ORANGE, "shape": "hv"},
        secondary_y=True,
    )
    laid_out(figure, RUN_TIME, "requests that arrive")
    return figure.update_yaxes(title="within all limits (%)", range=[0, 101], secondary_y=True)


def _quantiles(distribution: Distribution) -> tuple[Floats, Floats]:
    """Values and cumulative shares at equidistant shares, from 0 at the least value, with the far tail."""
    wanted = np.unique(np.concatenate([np.linspace(0, 1, QUANTILES), TAIL]))
    ranks = np.clip(np.ceil(wanted * distribution.count), 1, distribution.count)
    values = distribution.values[np.searchsorted(distribution.cumulative, ranks)]
    return np.concatenate([values[:1], values]), np.concatenate([[0.0], ranks / distribution.count])
