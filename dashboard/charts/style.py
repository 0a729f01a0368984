"""How all figures look: colours that the colour-blind tell apart and that stand out on light and on dark ground."""

from __future__ import annotations

import plotly.graph_objects as go

# Okabe and Ito's palette without its black and yellow, which vanish on dark and on light ground.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
SKY, VERMILION, PURPLE = "#56B4E9", "#D55E00", "#CC79A7"
GREY = "#999999"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY)
"""In the order in which series take them."""
DASHES = ("solid", "dash", "dot", "dashdot")
"""Beside the colour, where lines cross: colour alone must not carry a meaning."""

RUN_TIME = "time of the run (s)"


def laid_out(figure: go.Figure, x_title: str, y_title: str, height: int = 320) -> go.Figure:
    """Axis titles with their units, the legend above, no wasted margins."""
    figure.update_layout(
        xaxis_title=x_title,
        yaxis={"title": y_title, "rangemode": "tozero"},
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        legend={"orientation": "h", "y": 1.1},
        hovermode="x unified",
        height=height,
    )
    return figure
