"""A two-sample report for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from servetwin.sim.commands.trace_verdicts import VERDICTS
from servetwin.workloads.two_sample import Comparison, TwoSampleReport

STYLES = {"alike": "green", "close": "yellow", "differs": "red", "unknown": "dim"}


def comparison_table(report: TwoSampleReport, first: str, second: str) -> Table:
    """A line for each comparison: both figures (of a distribution its mean), the KS test, the verdict; its limits."""
    table = Table(title="Two-sample report", title_justify="left", caption=VERDICTS, caption_justify="left")
    table.add_column("", overflow="fold")
    for column in (first, second, "KS", "p"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for line in report.comparisons:
        table.add_row(
            _title(line),
            _number(line.first),
            _number(line.second),
            _number(line.ks_statistic, ""),
            _number(line.p_value, ""),
            Text(line.verdict, style=STYLES[line.verdict]),
        )
    return table


def _title(line: Comparison) -> str:
    return f"{line.name} (mean)" if line.ks_statistic is not None else line.name


def _number(value: float | None, absent: str = "unknown") -> str:
    return absent if value is None else f"{value:,.4g}"
