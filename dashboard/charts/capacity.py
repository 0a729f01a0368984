"""What a configuration can take and what that costs: points of a sweep, the curve and the configurations of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from servetwin.dashboard.charts.style import BLUE, GREEN, GREY, PALETTE, VERMILION, laid_out

if TYPE_CHECKING:
    import pandas as pd

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x")
"""Beside the colours."""


def points_and_frontier(
    points: pd.DataFrame,
    x: str,
    y: str,
    labels: Sequence[str],
    frontier: Sequence[int],
    units: Mapping[str, str],
) -> go.Figure:
    """Each point of a sweep by two figures; a line through those that no other one beats in both."""
    on_it = set(frontier)
    colors = [BLUE if n in on_it else GREY for n in range(len(points))]
    figure = go.Figure()
    figure.add_scatter(
        x=points[x],
        y=points[y],
        mode="markers",
        name="points",
        marker={"color": colors, "size": 9},
        text=[*labels],
        hovertemplate="%{text}<br>%{x:.5g}, %{y:.5g}<extra></extra>",
        showlegend=False,
    )
    line = points.iloc[[*frontier]]
    figure.add_scatter(
        x=line[x],
        y=line[y],
        mode="lines",
        name="frontier",
        line={"color": BLUE, "dash": "dot"},
        hoverinfo="skip",
    )
    laid_out(figure, titled(x, units), titled(y, units), height=420)
    return figure.update_layout(hovermode="closest").update_yaxes(rangemode="normal")


def along_parameter(
    frame: pd.DataFrame, parameter: str, figure_name: str, by: str | None, units: Mapping[str, str]
) -> go.Figure:
    """One figure of the runs against one parameter: a dot per run, a line through the means."""
    figure = go.Figure()
    groups = (
        [("all", frame)] if by is None else [(f"{by} {value}", part) for value, part in frame.groupby(by)]
    )
    for n, (name, part) in enumerate(groups):
        color, symbol = PALETTE[n % len(PALETTE)], SYMBOLS[n % len(SYMBOLS)]
        mean = part.groupby(parameter, sort=True)[figure_name].mean()
        figure.add_scatter(
            x=part[parameter],
            y=part[figure_name],
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 6, "opacity": 0.5},
            legendgroup=name,
            showlegend=False,
            hovertemplate="%{x}: %{y:.5g}<extra>a run</extra>",
        )
        figure.add_scatter(
            x=mean.index, y=mean, mode="lines+markers", name=name, legendgroup=name,
            line={"color": color}, marker={"symbol": symbol, "size": 9},
        )  # fmt: skip
    laid_out(figure, titled(parameter, units), titled(figure_name, units), height=380)
    return figure.update_layout(hovermode="closest", showlegend=by is not None)


def load_curve(row: Mapping[str, Any], metric: str, label: str, limit_ms: float | None) -> go.Figure:
    """A latency against the rate, as the search of a plan measured it; the limit, the largest good rate, the knee."""
    curve = row["curve"]
    figure = go.Figure()
    for good, color, symbol, name in ((True, GREEN, "circle", "good"), (False, VERMILION, "x", "too much")):
        part = [p for p in curve if p["good"] == good and p[f"{metric}_ms"] is not None]
        ends = [p[f"{metric}_ms_interval"] or (p[f"{metric}_ms"],) * 2 for p in part]
        values = [p[f"{metric}_ms"] for p in part]
        figure.add_scatter(
            x=[p["rate"] for p in part],
            y=values,
            mode="markers",
            name=name,
            marker={"color": color, "symbol": symbol, "size": 9},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [high - v for v, (_, high) in zip(values, ends, strict=True)],
                "arrayminus": [v - low for v, (low, _) in zip(values, ends, strict=True)],
            },
            text=[f"{p['verdict']}; waits for {p['waits_for'] or 'nothing'}" for p in part],
            hovertemplate="%{x:.4g} requests/s: %{y:.5g} ms<br>%{text}<extra></extra>",
        )
    if limit_ms is not None:
        figure.add_hline(y=limit_ms, line={"color": VERMILION, "dash": "dash"}, annotation_text="limit")
    for rate, words in ((row.get("max_request_rate"), "largest good rate"), (row.get("knee_rate"), "knee")):
        if rate is not None:
            figure.add_vline(x=rate, line={"color": GREY, "dash": "dot"}, annotation_text=words)
    laid_out(figure, "rate (requests/s)", f"{label} (ms)", height=380)
    return figure.update_layout(hovermode="closest")


def rates_of(labels: Sequence[str], rates: Sequence[float | None], target: float | None) -> go.Figure:
    """The largest rate that each configuration can take, and the one that was asked for."""
    figure = go.Figure(go.Bar(x=[r or 0.0 for r in rates], y=[*labels], orientation="h", marker_color=BLUE))
    if target is not None:
        figure.add_vline(x=target, line={"color": VERMILION, "dash": "dash"}, annotation_text="wanted")
    laid_out(figure, "largest rate within the limits (requests/s)", "", height=140 + 26 * len(labels))
    return figure.update_yaxes(autorange="reversed", type="category").update_layout(hovermode="closest")


def titled(name: str, units: Mapping[str, str]) -> str:
    """A figure with its unit; names that end in one say it themselves."""
    unit = units.get(name)
    return f"{name} ({unit})" if unit else name
