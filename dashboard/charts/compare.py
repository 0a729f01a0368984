"""Two runs side by side: how much each figure changed, how its distribution did, how single requests did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from servetwin.dashboard.charts.style import BLUE, GREY, ORANGE, laid_out
from servetwin.dashboard.charts.thinning import Floats

if TYPE_CHECKING:
    from servetwin.sim.comparison import Difference

COLUMNS = 2
PANEL_PX = 280
LINE_PX = 24


def forest(differences: Mapping[str, Difference]) -> go.Figure:
    """Relative changes from A to B with their intervals, one line each; those that have a percentage."""
    shown = {name: (d.delta_percent, d.interval_percent) for name, d in differences.items()}
    ends = [(name, at, within or (at, at)) for name, (at, within) in shown.items() if at is not None]
    figure = go.Figure()
    figure.add_scatter(
        x=[at for _, at, _ in ends],
        y=[name for name, _, _ in ends],
        mode="markers",
        name="B - A",
        marker={"color": BLUE, "size": 8},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [high - at for _, at, (_, high) in ends],
            "arrayminus": [at - low for _, at, (low, _) in ends],
            "color": BLUE,
        },
        hovertemplate="%{y}: %{x:+.2f} %<extra></extra>",
    )
    figure.add_vline(x=0, line={"color": GREY, "dash": "dash"})
    laid_out(figure, "change from A to B (%)", "", height=120 + LINE_PX * len(ends))
    return figure.update_yaxes(autorange="reversed", type="category").update_layout(hovermode="closest")


def both_cdfs(quantiles: Mapping[str, tuple[Floats, Floats, Floats]]) -> go.Figure:
    """The share of the pairs up to each latency, A and B in one panel for each name. Values in ms."""
    figure = _panels(quantiles)
    for n, (first, second, _) in enumerate(quantiles.values()):
        for side, values, color, dash in (("A", first, BLUE, "solid"), ("B", second, ORANGE, "dash")):
            _add_shares(figure, n, values, side, color, dash)
    return figure


def changes(quantiles: Mapping[str, tuple[Floats, Floats, Floats]]) -> go.Figure:
    """The share of the pairs whose latency changed by up to so much from A to B. Values in ms."""
    figure = _panels(quantiles)
    for n, (_, _, change) in enumerate(quantiles.values()):
        _add_shares(figure, n, change, "B - A", BLUE, "solid")
        figure.add_vline(x=0, line={"color": GREY, "dash": "dash"}, **_place(n))
    return figure


def _panels(quantiles: Mapping[str, tuple[Floats, Floats, Floats]]) -> go.Figure:
    rows = max(-(-len(quantiles) // COLUMNS), 1)
    figure = make_subplots(rows=rows, cols=COLUMNS, subplot_titles=[*quantiles], vertical_spacing=0.25 / rows)
    laid_out(figure, "", "", height=PANEL_PX * rows)
    for n in range(len(quantiles)):
        figure.update_xaxes(title="ms", **_place(n))
        figure.update_yaxes(title="pairs (%)" if n % COLUMNS == 0 else "", range=[0, 101], **_place(n))
    return figure.update_layout(hovermode="closest")


def _add_shares(figure: go.Figure, panel: int, values: Floats, name: str, color: str, dash: str) -> None:
    figure.add_scatter(
        x=values,
        y=100 * np.linspace(0, 1, len(values)),
        mode="lines",
        name=name,
        line={"color": color, "dash": dash},
        legendgroup=name,
        showlegend=panel == 0,
        hovertemplate=f"{name}: %{{y:.1f}} % up to %{{x:.4g}} ms<extra></extra>",
        **_place(panel),
    )


def _place(panel: int) -> dict[str, int]:
    return {"row": panel // COLUMNS + 1, "col": panel % COLUMNS + 1}
