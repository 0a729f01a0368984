"""The HTML of a report. Everything that a run brings along is escaped; styles, scripts and data stand in the page."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import orjson

from servetwin.dashboard.report_charts import ReportChart

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser refuses every request to a network, whatever stands in the page."""
AXIS = {"automargin": True, "title": {"standoff": 12}, "zeroline": False}
TEMPLATE = {"layout": {"xaxis": AXIS, "yaxis": AXIS}}
"""In the place of Plotly's own, whose light grounds a dark page would keep; colours are those of the page."""


def document(
    title: str, sections: Iterable[tuple[str, str]], head: str, charts: Sequence[ReportChart]
) -> str:
    """The whole page. `sections`: heading and HTML, in order; `head`: HTML above them."""
    sections = list(sections)
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in sections)
    body = "".join(
        f'<section><h2 id="{_anchor(name)}">{escape(name)}</h2>{html}</section>' for name, html in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_asset('report.css')}</style></head>\n"
        f"<body>\n{head}\n<nav>{links}</nav>\n{body}\n{_scripts(charts)}</body></html>\n"
    )


def chart_figures(charts: Iterable[ReportChart]) -> str:
    """A place for every chart, in the order in which `document` packs their data."""
    return (
        "".join(
            f"<figure><h3>{escape(chart.title)}</h3><figcaption>{escape(chart.caption)}</figcaption>"
            f'<div class="chart" role="img" aria-label="{escape(chart.title)}: {escape(chart.caption)}"'
            f"{' data-axis=time' if chart.over_time else ''}></div></figure>"
            for chart in charts
        )
        + "<noscript><p>The charts need JavaScript; all figures of this page stand in its tables.</p></noscript>"
    )


def key_figures(figures: Mapping[str, str]) -> str:
    """Labels and values side by side."""
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures.items())
    return f'<dl class="figures">{cells}</dl>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """The first column names a row; `numbers`: the others are set flush right."""
    kind = ' class="number"' if numbers else ""
    head = "".join(f"<th{kind if i else ''}>{escape(name)}</th>" for i, name in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind if i else ''}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A nested JSON value as dotted names and texts; empty objects and lists stand as such."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        yield name, ", ".join(map(str, value)) or "none"
    else:
        yield name, value if isinstance(value, str) else orjson.dumps(value).decode()


def _scripts(charts: Sequence[ReportChart]) -> str:
    if not charts:
        return ""
    figures = b"[" + b",".join(_figure_json(chart) for chart in charts) + b"]"
    plotly = files("plotly") / "package_data" / "plotly.min.js"
    return (
        f"{_packed('plotly', plotly.read_bytes())}\n{_packed('figures', figures)}\n"
        f"<script>\n{_asset('report.js')}</script>\n"
    )


def _figure_json(chart: ReportChart) -> bytes:
    figure = type(chart.figure)(chart.figure).update_layout(template=TEMPLATE)
    text: str = figure.to_json()
    return text.encode()


def _packed(name: str, content: bytes) -> str:
    """As text that `report.js` unpacks; the same bytes give the same text."""
    text = base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (files("servetwin.dashboard") / "assets" / name).read_text(encoding="utf-8")


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())
