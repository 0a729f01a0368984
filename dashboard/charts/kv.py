"""The KV pool: who has which block, how long contents stay, what is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from servetwin.dashboard.charts.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RUN_TIME,
    SKY,
    VERMILION,
    laid_out,
)

if TYPE_CHECKING:
    from servetwin.dashboard.block_map import BlockMap
    from servetwin.dashboard.prefix_tree import Node
    from servetwin.dashboard.residencies import Holding, Spans

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
STATES = {"free": "rgba(153,153,153,0.25)", "held": BLUE, "held by several": GREEN, "cached, free": SKY}
"""In the order of `block_map`'s numbers."""
OWNERS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, "#882255")
"""Requests take them in turn; the hover names them."""
BINS = 60
SHOWN_REQUESTS = 25
MARKS_AT_MOST = 200
TREE_DEPTH = 4
TREE_NODES = 300


def block_map(cells: BlockMap, names: Sequence[str], by: str, preempted_s: Sequence[float] = ()) -> go.Figure:
    """Blocks (rows) over time. `by`: state, owner or references; `names`: of the numbers of requests;
    `preempted_s`: instants of preemptions, drawn as lines.
    """
    z, scale = _colored(cells, by)
    figure = go.Figure(
        go.Heatmap(
            x=cells.times_s,
            y=cells.block_ids,
            z=z,
            text=[["" if n < 0 else names[n] for n in row] for row in cells.request.tolist()],
            hovertemplate="block %{y} at %{x:.4g} s<br>%{text}<extra></extra>",
            **scale,
        )
    )
    line = {"color": VERMILION, "width": 1, "dash": "dot"}
    # All at once: one by one they take Plotly longer than everything else on the page.
    marks = [
        {"type": "line", "x0": t, "x1": t, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        for t in preempted_s[:MARKS_AT_MOST]
    ]
    figure.update_layout(shapes=marks)
    laid_out(figure, RUN_TIME, "block", height=480)
    return figure.update_layout(hovermode="closest").update_yaxes(rangemode="normal")


def _colored(cells: BlockMap, by: str) -> tuple[Any, dict[str, Any]]:
    held = (cells.state == 1) | (cells.state == 2)
    if by == "owner":
        z = np.where(held, cells.request % len(OWNERS) + 2, np.where(cells.state == 3, 1, 0))
        names = [
            "free",
            "cached, free",
            *[f"request {n + 1}, {n + 1 + len(OWNERS)}, ..." for n in range(len(OWNERS))],
        ]
        return z.astype(np.uint8), _steps([STATES["free"], "rgba(86,180,233,0.45)", *OWNERS], names)
    if by == "references":
        most = max(int(cells.references.max(initial=0)), 1)
        bar = {"title": "requests that<br>held it at once"}
        return cells.references.astype(np.uint16), {
            "colorscale": "Cividis",
            "zmin": 0,
            "zmax": most,
            "colorbar": bar,
        }
    return cells.state.astype(np.uint8), _steps([*STATES.values()], [*STATES])


def _steps(colors: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """A colour for each whole number from 0 on."""
    n = len(colors)
    scale = [[edge, color] for i, color in enumerate(colors) for edge in (i / n, (i + 1) / n)]
    bar = {"tickvals": [*range(n)], "ticktext": [*names]}
    return {"colorscale": scale, "zmin": -0.5, "zmax": n - 0.5, "colorbar": bar}


def filled_by(held: Holding) -> go.Figure:
    """What fills the pool at one instant, as bars."""
    named = list(held.of_requests.items())
    bars = named[:SHOWN_REQUESTS]
    if rest := named[SHOWN_REQUESTS:]:
        bars.append((f"{len(rest)} more requests", sum(n for _, n in rest)))
    colors = [BLUE] * len(bars) + [GREEN, SKY, GREY]
    bars += [
        ("shared, bringer gone", held.left_behind),
        ("cached, free", held.cached_free),
        ("free", held.free),
    ]
    figure = go.Figure(
        go.Bar(
            y=[name for name, _ in bars],
            x=[n for _, n in bars],
            orientation="h",
            marker_color=colors,
            hovertemplate="%{y}: %{x} blocks<extra></extra>",
        )
    )
    laid_out(figure, "KV-cache blocks", "", height=120 + 18 * len(bars))
    figure.update_yaxes(autorange="reversed", type="category")
    return figure.update_layout(hovermode="closest")


def evictions(begins_s: Floats, counts: Floats, window: tuple[float, float]) -> go.Figure:
    """Cached contents dropped in the equal parts of a window, over time; the axis is that of the charts beside it."""
    width_s = (window[1] - window[0]) / len(begins_s)
    figure = go.Figure(go.Bar(x=begins_s, y=counts, width=width_s or None, marker_color=VERMILION, offset=0))
    laid_out(figure, RUN_TIME, "evicted blocks", height=220)
    return figure.update_xaxes(range=[*window]) if width_s else figure


def unused_slots(unused: Floats) -> go.Figure:
    """How many slots the last block of a request had left."""
    figure = go.Figure(go.Bar(x=np.arange(len(unused)), y=unused, marker_color=BLUE))
    return laid_out(figure, "unused slots of the last block (tokens)", "requests", height=260)


def spans(samples: Spans) -> go.Figure:
    """How long contents live, lie idle before they go, and lie idle before they are taken back."""
    panels = {
        "lifetime (s)": samples.lifetime,
        "idle before eviction (s)": samples.idle_before_eviction,
        "idle before reuse (s)": samples.idle_before_reuse,
    }
    figure = make_subplots(rows=1, cols=len(panels))
    for column, ((title, values), color) in enumerate(
        zip(panels.items(), (BLUE, VERMILION, GREEN), strict=True), 1
    ):
        counts, edges = _log_bins(values)
        figure.add_bar(
            x=np.sqrt(edges[:-1] * edges[1:]),
            y=counts,
            width=np.diff(edges),
            marker_color=color,
            name=title,
            row=1,
            col=column,
        )
        figure.update_xaxes(title=title, type="log", row=1, col=column)
    figure.update_yaxes(title="contents of blocks", row=1, col=1)
    return figure.update_layout(height=300, showlegend=False, margin={"l": 10, "r": 10, "t": 30, "b": 10})


def hits(counts: Floats) -> go.Figure:
    """How often contents were hit: 0, 1, 2 to 3, 4 to 7, ..."""
    power = np.where(counts > 0, np.floor(np.log2(np.maximum(counts, 1))) + 1, 0).astype(np.int64)
    bars = np.bincount(power)
    names = ["0", *[f"{2**k}" if k == 0 else f"{2**k} to {2 ** (k + 1) - 1}" for k in range(len(bars) - 1)]]
    figure = go.Figure(go.Bar(x=names, y=bars, marker_color=BLUE))
    laid_out(figure, "hits of a content", "contents of blocks (log)", height=260)
    # From below 1, or the least bar of a logarithmic axis would have no height.
    top = np.log10(max(bars.max(initial=1), 1)) + 0.1
    return figure.update_yaxes(type="log", range=[np.log10(0.5), top]).update_xaxes(type="category")


def hit_loss(parts: Mapping[str, int]) -> go.Figure:
    """What became of prompt tokens, as bars."""
    colors = [GREEN, GREY, VERMILION, ORANGE, PURPLE, SKY]
    figure = go.Figure(
        go.Bar(
            y=[*parts],
            x=[*parts.values()],
            orientation="h",
            marker_color=colors[: len(parts)],
            hovertemplate="%{y}: %{x:,} tokens<extra></extra>",
        )
    )
    laid_out(figure, "prompt tokens", "", height=300)
    return figure.update_yaxes(autorange="reversed").update_layout(hovermode="closest")


def prefix_tree(roots: Sequence[Node], block_size: int) -> go.Figure:
    """Beginnings that prompts share, from left to right; the height of a box is the number of its requests."""
    ids: list[str] = []
    parents: list[str] = []
    labels: list[str] = []
    values: list[int] = []
    level = [("", node) for node in roots]
    while level and len(ids) < TREE_NODES:
        following = []
        for parent, node in level[: TREE_NODES - len(ids)]:
            ids.append(str(len(ids)))
            parents.append(parent)
            labels.append(f"{node.requests} requests, {len(node.contents) * block_size:,} tokens")
            values.append(node.requests)
            following += [(ids[-1], child) for child in sorted(node.children, key=lambda n: -n.requests)]
        level = following
    figure = go.Figure(
        go.Icicle(
            ids=ids,
            parents=parents,
            labels=labels,
            values=values,
            branchvalues="total",
            maxdepth=TREE_DEPTH,
            tiling={"orientation": "h"},
            marker={"colorscale": "Cividis", "colors": values},
            hovertemplate="%{label}<extra></extra>",
        )
    )
    return figure.update_layout(height=480, margin={"l": 10, "r": 10, "t": 30, "b": 10})


def _log_bins(values: Floats) -> tuple[Floats, Floats]:
    """Counts [bins] between edges [bins + 1] at equal ratios; what took no time at all is in the first bin."""
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1e-3, 1.0)
    edges = np.geomspace(low, max(high, low * 1.01), BINS + 1)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
    return counts.astype(np.float64), edges
