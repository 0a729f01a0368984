"""`servetwin report`: one run as one HTML file that opens from disk and asks no network for anything.

Charts, key figures, configuration, caveats and formulas of the dashboard, for a mail, a CI artifact, a printer.
The same run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from servetwin.dashboard import report_page as html
from servetwin.dashboard.caveats import caveats
from servetwin.dashboard.library import Library
from servetwin.dashboard.report_charts import ReportChart, report_charts
from servetwin.dashboard.words import NO_DATA, percent, quantity
from servetwin.sim.definitions import DEFINITIONS
from servetwin.sim.metrics import summarize
from servetwin.sim.runs import Run

LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "E2E",
    "ntpot": "NTPOT",
    "queue": "queue time",
}
LATENCIES |= {"prefill": "prefill time", "decode": "decode time"}
STATISTICS = ("count", "mean", "std", "p50", "p90", "p95", "p99", "max")
HEADER_PARTS = (
    "config",
    "workload",
    "executor",
    "versions",
    "host",
    "seed",
    "workload_fingerprint",
    "schema_version",
)


def report(path: str | Path, metric_defs: str | None = None) -> str:
    """The page for a run folder. `metric_defs`: whose definitions (default: those of its own summary).

    Raises RunFolderError for a folder that is no run or is damaged, ValueError for unknown definitions.
    """
    data = Library().open(Path(path))
    run, summary = data.run, dict(data.summary)
    if metric_defs is not None and metric_defs != summary["servetwin"]["metric_defs"]:
        notes = summary["servetwin"].get("notes")
        summary = summarize(run, metric_defs)
        summary["servetwin"] |= {"notes": notes} if notes else {}
    charts = report_charts(data, summary["servetwin"]["metric_defs"])
    name = run.path.resolve().name
    return html.document(
        f"servetwin report: {name}", _sections(run, summary, charts), _head(name, run, summary), charts
    )


def _head(name: str, run: Run, summary: dict[str, Any]) -> str:
    header = run.header
    version = header.get("versions", {}).get("servetwin", "unknown")
    facts = f"Run {name}, {run.state}, begun {header['wall_started'][:19].replace('T', ' ')} UTC, servetwin {version}."
    found = caveats(run, summary)
    return (
        f"<header><h1>{escape(name)}</h1>{html.paragraph(facts, 'faint')}</header>"
        f'<div class="caveats" role="note"><strong>Before believing these figures</strong>{html.bullets(found)}</div>'
    )


def _sections(run: Run, summary: dict[str, Any], charts: list[ReportChart]) -> Iterator[tuple[str, str]]:
    yield "Key figures", html.key_figures(_key_figures(summary))
    yield "Latencies", _latencies(summary["servetwin"])
    if charts:
        hint = "Drag over a chart to zoom, double-click to see all again; charts over time move together."
        yield "Charts", html.paragraph(hint, "faint") + html.chart_figures(charts)
    header = {key: run.header[key] for key in HEADER_PARTS if key in run.header}
    yield "Configuration", html.table(("setting", "value"), html.flat(header))
    yield "Formulas", _formulas(summary["servetwin"])


def _key_figures(summary: dict[str, Any]) -> dict[str, str]:
    ours = summary["servetwin"]
    return {
        "completed requests": f"{summary['completed']:,} of {summary['completed'] + summary['failed']:,}",
        "duration": quantity(summary["duration"], " s"),
        "request throughput": quantity(summary["request_throughput"], " requests/s"),
        "output throughput": quantity(summary["output_throughput"], " tokens/s"),
        "total throughput": quantity(summary["total_token_throughput"], " tokens/s"),
        "median TTFT": quantity(summary["median_ttft_ms"], " ms"),
        "p99 TTFT": quantity(summary["p99_ttft_ms"], " ms"),
        "median TPOT": quantity(summary["median_tpot_ms"], " ms"),
        "p99 TPOT": quantity(summary["p99_tpot_ms"], " ms"),
        "steps": f"{ours['steps']:,}",
        "busy time": quantity(summary["busy_time_s"], " s"),
        "preemptions": f"{ours['preemptions']:,}",
        "recomputed tokens": f"{ours['recomputed_tokens']:,} ({percent(ours['recomputed_fraction'])})",
        "prompt tokens from the prefix cache": percent(ours["cached_prompt_fraction"]),
        "peak KV use": percent(ours["kv_peak_used_fraction"]),
        "evictions": f"{ours['evictions']:,}",
    }


def _latencies(ours: dict[str, Any]) -> str:
    rows = [
        (title, *(_cell(ours["latency"][f"{key}_ms"][s]) for s in STATISTICS))
        for key, title in LATENCIES.items()
        if f"{key}_ms" in ours["latency"]
    ]
    note = (
        f"In ms, by the definitions of {ours['metric_defs']}; percentiles {ours['percentile_method']}, "
        "std of the population."
    )
    return html.table(("metric", *STATISTICS), rows, numbers=True) + html.paragraph(note, "faint")


def _formulas(ours: dict[str, Any]) -> str:
    used = html.table(("quantity", f"formula ({ours['metric_defs']})"), ours["formulas"].items())
    others = [
        (metric.upper(), definitions.name, formula)
        for definitions in DEFINITIONS.values()
        if definitions.name != ours["metric_defs"]
        for metric, formula in definitions.formulas(held_back=True).items()
    ]
    text = "The same words elsewhere (sent: when the client sent the request, its arrival unless it was held back):"
    return used + html.paragraph(text) + html.table(("metric", "definitions of", "formula"), others)


def _cell(value: float | None) -> str:
    return NO_DATA if value is None else _number(value, 6)


def _number(value: float, digits: int) -> str:
    """So many significant digits, whole numbers whole: no exponents among the figures of a run."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"
