"""The run over time: load, queue, KV cache, tokens and step times in one figure whose panels move together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from servetwin.dashboard.charts.style import BLUE, GREEN, GREY, ORANGE, RUN_TIME, SKY, VERMILION, laid_out
from servetwin.dashboard.charts.thinning import Floats, keep

if TYPE_CHECKING:
    import pandas as pd

STEP_COLUMNS = (
    "start_s", "running", "waiting", "used_blocks", "cached_free_blocks", "free_blocks", "prefill_tokens",
    "decode_tokens", "prepare_s", "device_s", "predicted_s",
)  # fmt: skip
"""Of steps/, what `time_series` draws; predicted_s may be missing."""
BINS = 300
"""Of the arrivals."""
PANEL_PX = 190
LANE_STEPS = 120
"""Steps that the lanes show; more would be lines without width."""


class Line(NamedTuple):
    """A series of a panel."""

    name: str
    values: Floats
    color: str
    dash: str = "solid"


def time_series(
    steps: pd.DataFrame,
    arrivals_s: Floats,
    window: tuple[float, float],
    foretold: tuple[Floats, Floats] | None = None,
) -> go.Figure:
    """Five panels over one axis of time: arrivals, requests, KV blocks, tokens a step, step time.

    `foretold`: beginnings of steps in s, and how long a profile says that each takes, in ms.

    `steps`: STEP_COLUMNS in order of start_s; `arrivals_s`: instants. A count holds from its schedule call to the
    next. Every panel keeps the extremes of what it shows.
    """
    titles = ["arrivals (requests/s)", *PANELS]
    figure = make_subplots(rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=0.03)
    _add_arrivals(figure, arrivals_s, window)
    x = steps.start_s.to_numpy(dtype=np.float64)
    for row, (title, lines) in enumerate(PANELS.items(), start=2):
        _add_lines(figure, row, x, lines(steps), stacked=title == BLOCKS)
    if foretold is not None:
        line = Line("foretold by the profile", foretold[1], VERMILION, "dot")
        _add_lines(figure, len(titles), foretold[0], [line], stacked=False)
    laid_out(figure, "", "", height=PANEL_PX * len(titles))
    for row, title in enumerate(titles, start=1):
        figure.update_yaxes(title=title, rangemode="tozero", row=row, col=1)
        figure.update_xaxes(title="", row=row, col=1)
    figure.update_xaxes(title=RUN_TIME, range=list(window), row=len(titles), col=1)
    # Room for the bar of tools above the legend.
    return figure.update_layout(legend={"y": 1.02, "traceorder": "normal"}, margin={"t": 70})


def requests_over_time(steps: pd.DataFrame) -> go.Figure:
    """Running and waiting requests after each schedule call."""
    return _one_panel(steps, REQUESTS)


def kv_blocks_over_time(steps: pd.DataFrame) -> go.Figure:
    """The usable KV blocks, stacked: in use, free with content that can be hit, free."""
    return _one_panel(steps, BLOCKS)


def finish_reasons(counts: Mapping[str, int]) -> go.Figure:
    """How requests ended, as bars."""
    figure = go.Figure(go.Bar(x=list(counts), y=list(counts.values()), marker_color=BLUE))
    return laid_out(figure, "finish reason", "requests")


def lanes(steps: pd.DataFrame) -> go.Figure:
    """What host and device do in the first LANE_STEPS of these steps: with steps in flight they overlap.

    Columns: start_s, schedule_s, prepare_start_s, prepare_s, device_start_s, device_s, rows.
    """
    steps = steps.head(LANE_STEPS)
    figure = go.Figure()
    for lane, name, start, length, color in (
        ("host", "schedule", "start_s", "schedule_s", BLUE),
        ("host", "prepare", "prepare_start_s", "prepare_s", SKY),
        ("device", "device", "device_start_s", "device_s", ORANGE),
    ):
        figure.add_bar(
            y=[lane] * len(steps),
            x=steps[length],
            base=steps[start],
            name=name,
            orientation="h",
            marker={"color": color, "line": {"width": 1, "color": GREY}},
            customdata=np.stack([steps.index.to_numpy(), steps.rows.to_numpy()], axis=1),
            hovertemplate="step %{customdata[0]}, %{customdata[1]} rows<br>from %{base:.6f} s, %{x:.6f} s long",
        )
    laid_out(figure, RUN_TIME, "", height=220)
    # So low a figure has no room for the legend where it stands elsewhere: it would cover a lane.
    legend = {"y": 1.02, "yanchor": "bottom"}
    return figure.update_layout(barmode="overlay", hovermode="closest", legend=legend)


def _request_lines(steps: pd.DataFrame) -> list[Line]:
    return [
        Line("running", _column(steps, "running"), BLUE),
        Line("waiting", _column(steps, "waiting"), ORANGE, "dash"),
    ]


def _block_lines(steps: pd.DataFrame) -> list[Line]:
    return [
        Line("used", _column(steps, "used_blocks"), BLUE),
        Line("cached, free", _column(steps, "cached_free_blocks"), SKY),
        Line("free", _column(steps, "free_blocks"), GREY),
    ]


def _token_lines(steps: pd.DataFrame) -> list[Line]:
    return [
        Line("prefill", _column(steps, "prefill_tokens"), ORANGE),
        Line("decode", _column(steps, "decode_tokens"), GREEN, "dash"),
    ]


def _time_lines(steps: pd.DataFrame) -> list[Line]:
    taken = (_column(steps, "prepare_s") + _column(steps, "device_s")) * 1e3
    lines = [Line("step time of the run", taken, BLUE)]
    if "predicted_s" in steps and steps.predicted_s.notna().any():
        lines.append(Line("predicted", _column(steps, "predicted_s") * 1e3, VERMILION, "dot"))
    return lines


REQUESTS, BLOCKS, TOKENS, TIMES = "requests", "KV-cache blocks", "tokens per step", "step time (ms)"
PANELS = {REQUESTS: _request_lines, BLOCKS: _block_lines, TOKENS: _token_lines, TIMES: _time_lines}


def _column(steps: pd.DataFrame, name: str) -> Floats:
    values: Floats = steps[name].to_numpy(dtype=np.float64)
    return values


def _add_arrivals(figure: go.Figure, arrivals_s: Floats, window: tuple[float, float]) -> None:
    counts, edges = np.histogram(arrivals_s, bins=BINS, range=window if window[1] > window[0] else None)
    rates = counts / np.diff(edges)
    figure.add_scatter(
        x=edges[:-1],
        y=rates,
        name="arrivals",
        mode="lines",
        line={"shape": "hv", "width": 1, "color": GREY},
        row=1,
        col=1,
    )


def _add_lines(
    figure: go.Figure, row: int | None, x: Floats, lines: Sequence[Line], *, stacked: bool
) -> None:
    kept = keep(x, [np.nan_to_num(line.values) for line in lines])
    place = {} if row is None else {"row": row, "col": 1}
    for line in lines:
        figure.add_scatter(
            x=x[kept],
            y=line.values[kept],
            name=line.name,
            mode="lines",
            line={"shape": "hv", "width": 0.5 if stacked else 1.5, "color": line.color, "dash": line.dash},
            stackgroup="blocks" if stacked else None,
            **place,
        )


def _one_panel(steps: pd.DataFrame, title: str) -> go.Figure:
    figure = go.Figure()
    x = steps.start_s.to_numpy(dtype=np.float64)
    _add_lines(figure, None, x, PANELS[title](steps), stacked=title == BLOCKS)
    return laid_out(figure, RUN_TIME, title)
