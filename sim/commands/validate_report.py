"""What `servetwin validate` found, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servetwin.sim.commands.validate_steps import steps_json, steps_report
from servetwin.sim.commands.validating import Validation, parts_of, totals
from servetwin.sim.validation.again import Again
from servetwin.sim.validation.comparison import MetricComparison, Stats
from servetwin.sim.validation.measured import FORMULAS

TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "queue": "queue",
    "scheduled_to_first": "scheduled to first token",
}
CURVE_TITLES = {
    "running": "running requests",
    "waiting": "waiting requests",
    "kv_percent": "KV cache in percent",
}


def to_json(found: Validation) -> dict[str, Any]:
    """One object."""
    calibrated = None
    if found.factor is not None:
        calibrated = {
            "what": f"factor of {found.factor_of}",
            "value": found.factor,
            "on": "mean TPOT of the first half of the requests",
        }
    return {
        "run": found.run.path,
        "source": found.run.source,
        "hardware": found.run.hardware,
        "requests": len(found.run.requests),
        "engine": found.engine.model_dump(mode="json"),
        "assumed": list(found.assumed),
        "metrics": _metrics_json(found.metrics),
        "parts": {who: _metrics_json(metrics) for who, metrics in parts_of(found)},
        "calibrated": calibrated,
        "thresholds_percent": found.thresholds,
        "missed": found.missed,
        "noise_percent": found.noise_percent,
        "noise_of_steps_percent": 100 * found.noise,
        "totals": totals(found),
        "curves": {name: asdict(curve) for name, curve in found.curves.items()},
        "curve_shift_s": found.curve_shift_s,
        "tpot_error_by_rows": [asdict(band) for band in found.bands],
        "load": {**asdict(found.load), "words": found.load.words},
        "steps": len(found.simulated.steps),
        "steps_outside_measured_region": found.outside_steps,
        "preemptions": found.simulated.preemptions,
        **steps_json(found),
        "again": None if found.again is None else _again_json(found.again),
        "formulas": FORMULAS,
    }


def _metrics_json(metrics: dict[str, MetricComparison]) -> dict[str, Any]:
    return {name: metrics[name].to_json() for name in TITLES if name in metrics}


def _again_json(again: Again) -> dict[str, Any]:
    return {
        "run": again.run.path,
        "difference_percent": {name: metric.errors_percent for name, metric in again.metrics.items()},
        "plans": None if again.plans is None else again.plans.to_json(),
    }


def report(found: Validation) -> Iterator[RenderableType]:
    """For people."""
    for line in found.assumed:
        yield Text(f"assumed: {line}", style="yellow")
    if found.factor is not None:
        yield f"calibrated: {found.factor_of} x {found.factor:.4f}, by the mean TPOT of the first half"
    for who, metrics in parts_of(found):
        yield _metrics_table(found, who, metrics)
    yield Text(_formulas(found), style="dim")
    yield _totals_table(found)
    yield from steps_report(found)
    if found.curves:
        yield _curves_table(found)
    yield _bands_table(found)
    yield from _words(found)


def _metrics_table(found: Validation, who: str, metrics: dict[str, MetricComparison]) -> Table:
    table = Table(title=who, title_justify="left", box=SIMPLE_HEAD, show_edge=False, collapse_padding=True)
    # Lines of a cell belong to those of the others, so none may break.
    table.add_column("", max_width=12)
    table.add_column("", no_wrap=True)
    for name in ("mean", "P50", "P90", "P99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("median\nrequest", justify="right")
    table.add_column("chance\n(sd)", justify="right", no_wrap=True)
    # Of all requests: a second measured run is told once.
    again = found.again.metrics if found.again is not None and metrics is found.metrics else {}
    for name in TITLES:
        if name in metrics:
            comparison, noise = metrics[name], found.noise_percent.get(name)
            table.add_row(
                TITLES[name],
                "measured\nsimulated\nerror" + ("\nsecond run" if again else ""),
                *(_cell(comparison, again.get(name), of) for of in Stats.__slots__),
                # Gaps are not those of requests.
                "" if name == "itl" else _percent(comparison.median_request_error_percent, signed=False),
                "" if noise is None else f"±{noise:.2f} %",
            )
    return table


def _cell(comparison: MetricComparison, again: MetricComparison | None, of: str) -> str:
    if comparison.measured is None or comparison.simulated is None:
        return "unknown"
    measured, simulated = (getattr(side, of) for side in (comparison.measured, comparison.simulated))
    lines = [_seconds(measured), _seconds(simulated), _percent(comparison.error_percent(of))]
    return "\n".join(lines if again is None else [*lines, _percent(again.error_percent(of))])


def _formulas(found: Validation) -> str:
    lines = [f"{title} = {FORMULAS[name]}" for name, title in TITLES.items() if name in found.metrics]
    lines.append(
        "median request: of the absolute errors of single ones; chance: standard deviation of the mean "
        f"by {100 * found.noise:.1f} % noise on every step"
    )
    if found.again is not None:
        lines.append(f"second run = {found.again.run.path} / measured - 1")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{1e3 * value:.4g} ms" if value < 1 else f"{value:.4g} s"


def _percent(value: float | None, *, signed: bool = True) -> str:
    if value is None:
        return "unknown"
    return f"{value:+.1f} %" if signed else f"{value:.2f} %"


def _totals_table(found: Validation) -> Table:
    table = Table(title="The run as a whole", title_justify="left")
    for name in ("", "measured", "simulated", "error"):
        table.add_column(name, justify="left" if not name else "right")
    titles = {"makespan_s": "makespan in s", "output_tokens_per_s": "output tokens/s"}
    for name, sides in totals(found).items():
        error = 100 * (sides["simulated"] / sides["measured"] - 1)
        table.add_row(
            titles[name], f"{sides['measured']:,.5g}", f"{sides['simulated']:,.5g}", _percent(error)
        )
    return table


def _curves_table(found: Validation) -> Table:
    title = f"Curves at the measured samples (clocks shifted by {found.curve_shift_s:+.1f} s)"
    table = Table(title=title, title_justify="left")
    for name in ("", "mean absolute error", "mean measured", "max measured", "max simulated"):
        table.add_column(name, justify="left" if not name else "right")
    for name, curve in found.curves.items():
        figures = (curve.mean_absolute_error, curve.mean_measured, curve.max_measured, curve.max_simulated)
        table.add_row(CURVE_TITLES[name], *(f"{figure:,.3g}" for figure in figures))
    return table


def _bands_table(found: Validation) -> Table:
    table = Table(title="TPOT error by the rows that ran beside a request", title_justify="left")
    for name in ("rows", "requests", "median error"):
        table.add_column(name, justify="right")
    for band in found.bands:
        table.add_row(band.rows, f"{band.requests:,}", _percent(band.tpot_error_percent))
    return table


def _words(found: Validation) -> Iterator[RenderableType]:
    load = found.load
    yield (
        f"load: {load.words} (requests waited during {load.waiting_percent:.0f} % of the busy time; "
        f"{load.unfinished_percent:.0f} % were unfinished when the last one arrived): near saturation an error of 1 % "
        "in step times becomes several in TTFT"
    )
    if found.outside_steps:
        yield Text(
            f"{found.outside_steps:,} of {len(found.simulated.steps):,} steps lie outside the region that was measured",
            style="yellow",
        )
    for name in found.thresholds:
        error, limit = found.judged[name].error_percent(), found.thresholds[name]
        if error is None:
            continue
        passed = abs(error) <= limit
        said = (
            f"{TITLES[name]} mean: {error:+.2f} %, allowed ±{limit:g} %: {'passed' if passed else 'missed'}"
        )
        yield Text(said, style="green" if passed else "red")
