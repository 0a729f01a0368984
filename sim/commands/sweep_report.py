"""What a person sees of a sweep: progress on stderr, a table of its points on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from servetwin.sim.commands.run_fields import plain
from servetwin.sim.commands.show import print_json, results_console
from servetwin.sim.planning.results import FAILED, Results, by_point, half_widths, lead
from servetwin.sim.planning.sweep import Ended, PlannedRun, Sweep

if TYPE_CHECKING:
    import pandas as pd

SHOWN = (
    ("request_throughput", "requests\n/s"),
    ("output_throughput", "output\ntokens/s"),
    ("mean_ttft_ms", "TTFT\nmean"),
    ("p99_ttft_ms", "TTFT\np99"),
    ("mean_tpot_ms", "TPOT\nmean"),
    ("p99_tpot_ms", "TPOT\np99"),
)
"""Columns of the table on the screen."""
MOST_ROWS, MOST_COLUMNS = 40, 1_000
INTERVAL = "half_width_95"
"""Key of a point's intervals: half the width of the 95 % t interval of each mean, over the seeds."""


class SweepProgress:
    """A progress bar of ended runs, with the time that is left."""

    def __init__(self, total: int) -> None:
        fixed = Column(no_wrap=True)
        self._failed = self._reused = 0
        self._progress = Progress(
            TextColumn("sweep", table_column=fixed),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.completed:.0f}/{task.total:.0f} runs", table_column=fixed),
            TextColumn("{task.fields[told]}", table_column=fixed),
            TextColumn("ETA", table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            console=Console(stderr=True),
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task("", total=total, told="")

    def __enter__(self) -> SweepProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def ended(self, ended: Ended) -> None:
        """One more."""
        self._failed += ended.record.error is not None
        self._reused += ended.reused
        told = {"failed": self._failed, "reused": self._reused}
        words = ", ".join(f"{number} {word}" for word, number in told.items() if number)
        self._progress.update(self._task, advance=1, told=words)


def describe(results: Results) -> dict[str, Any]:
    """The sweep as JSON values: what it is, its points with the means over their seeds, and the best of them."""
    about = dict(results.about)
    return {**about, "points": _points(results), "best": best(results)}


def best(results: Results) -> dict[str, Any] | None:
    """The point whose objective is smallest (largest); None without an objective or a point that has one.

    `lead`: how far it is ahead of the next point, and half the width of the 95 % interval of that, paired by seed.
    """
    name = results.about["objective"]
    points = [
        point
        for point in _points(results)
        if name and point.get(name) is not None and not point["failed_runs"]
    ]
    if not points:
        return None
    down = results.about["direction"] == "maximize"
    points.sort(key=lambda point: -point[name] if down else point[name])
    ahead = lead(results, [point["point"] for point in points[:2]], name) if len(points) > 1 else None
    return points[0] | {"lead": None if ahead is None else [abs(ahead[0]), ahead[1]]}


def _points(results: Results) -> list[dict[str, Any]]:
    objective = results.about["objective"]
    names = ["completed", *(name for name, _ in SHOWN)]
    names += [objective] if objective and objective not in names else []
    frame = by_point(results)
    names = [name for name in names if name in frame.columns]
    columns = ["point", *results.parameters, "runs", "failed_runs", *names]
    points = _records(frame[list(dict.fromkeys(columns))])
    if results.about["seeds"] > 1:
        for point, widths in zip(points, _records(half_widths(results)[names]), strict=True):
            point[INTERVAL] = widths
    return points


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON values."""
    rows = frame.astype(object)
    return [{str(k): v for k, v in row.items()} for row in rows.where(rows.notna(), None).to_dict("records")]


def seeds_are_alike(results: Results) -> bool:
    """There are several seeds, and in no point do they make a difference."""
    frame = results.frame[results.frame.state != FAILED]
    alike = frame.groupby("point")[[*results.figures]].nunique(dropna=False)
    return bool(results.about["seeds"] > 1 and len(frame) and (alike == 1).all(axis=None))


def show(results: Results, file: Path) -> None:
    """The table of points, what failed, and the best."""
    points = _points(results)
    objective = results.about["objective"]
    shown = [*SHOWN]
    if objective and objective not in dict(SHOWN):
        shown.append((objective, objective))
    seeds = results.about["seeds"]
    mean = f", means over {seeds} seeds" if seeds > 1 else ""
    table = _table(f"Points{mean}; TTFT and TPOT in ms", results.parameters)
    for _, title in shown:
        table.add_column(title, justify="right")
    for point in points[:MOST_ROWS]:
        cells = ["no data" if point.get(name) is None else _cell(point[name]) for name, _ in shown]
        if point["failed_runs"]:
            cells[0] = f"{point['failed_runs']} failed"
        table.add_row(*(escape(_cell(point[name])) for name in results.parameters), *cells)
    console = _printed(table, len(points))
    frame = results.frame
    failed = frame[frame.state == FAILED]
    if len(failed):
        first = failed.iloc[0]
        _say_line(console, f"failed: {len(failed)} of {len(frame)} runs; run {first.run}: {first.error}")
    found = best(results)
    if found is not None:
        chosen = ", ".join(f"{name} {_cell(found[name])}" for name in results.parameters) or "the only point"
        told = _cell(found[objective])
        if found.get(INTERVAL, {}).get(objective) is not None:
            told += f" ± {_cell(found[INTERVAL][objective])} (95 % interval over {seeds} seeds)"
        _say_line(console, f"best {objective} ({results.about['direction']}): {told} with {chosen}")
        if found["lead"] is not None:
            ahead, width = map(_cell, found["lead"])
            _say_line(console, f"ahead of the next point by {ahead} ± {width}, seed by seed")
    _say_line(console, f"all runs     {file}")


def show_plan(sweep: Sweep, planned: Sequence[PlannedRun], num_reused: int, *, json: bool) -> int:
    """What a sweep would do: the points of its first batch, which are all of them unless some are chosen by others."""
    seeds = sweep.definition.seeds
    points = [{name: plain(value) for name, value in run.point.items()} for run in planned[::seeds]]
    if json:
        counts = {"num_points": sweep.num_points, "num_runs": sweep.num_runs, "reused": num_reused}
        print_json({"dry_run": True, "points": points, **counts})
        return 0
    table = _table("Points", sweep.definition.names())
    for point in points[:MOST_ROWS]:
        table.add_row(*(escape(_cell(value)) for value in point.values()))
    console = _printed(table, len(points)) if points[0] else results_console()
    line = f"{sweep.num_points:,} points x {seeds:,} seeds = {sweep.num_runs:,} runs, {num_reused:,} of them done "
    line += "already"
    if later := sweep.num_runs - len(planned):
        line += f"; {later:,} more are chosen by what these give"
    _say_line(console, line)
    return 0


def _say_line(console: Console, line: str) -> None:
    """As it is: brackets in an error are no markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, parameters: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in parameters:
        table.add_column(name)
    return table


def _printed(table: Table, num_points: int) -> Console:
    """Numbers are never cut: a narrower terminal breaks the lines."""
    console = results_console()
    unbounded = console.options.update(width=MOST_COLUMNS)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
    if num_points > MOST_ROWS:
        _say_line(console, f"and {num_points - MOST_ROWS} more points")
    return console


def _cell(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float) and isfinite(value):
        return f"{value:,.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
