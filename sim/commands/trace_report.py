"""The figures of a trace for the terminal: tables, a plot of the rate, warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import floor, log10
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servetwin.workloads.statistics import TraceFigures
from servetwin.workloads.statistics.arrivals import ArrivalFigures
from servetwin.workloads.statistics.prefix_reuse import PrefixFigures
from servetwin.workloads.statistics.sessions import SessionFigures
from servetwin.workloads.wording import counted

PLOT_WIDTH, PLOT_HEIGHT = 100, 12
REUSE_UNKNOWN = (
    "prefix reuse unknown: the trace does not say what prompts begin with, so a run gives every request (every "
    "session, where turns go on from one another) a prompt of its own and measures no reuse between them"
)


def report(figures: TraceFigures, width: int) -> Iterator[RenderableType]:
    """Everything that `--json` says, for people; at most `width` columns."""
    yield f"{figures.trace.path}: {figures.trace.format}{_read_as(figures.trace.about)}"
    yield _rows(figures)
    for warning in figures.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    for note in figures.trace.notes:
        yield f"note: {note}"
    if figures.arrivals is not None:
        yield _arrivals(figures.arrivals)
        yield Text(rate_plot(figures.arrivals, min(width, PLOT_WIDTH)))
    yield _lengths(figures)
    if figures.prefix is None:
        yield REUSE_UNKNOWN
    else:
        yield _prefix(figures.prefix)
        sizes = " and ".join(f"{size:,}" for size in figures.prefix.block_tokens)
        blocks, prompts = counted(figures.prefix.blocks, "block"), counted(figures.prefix.requests, "prompt")
        yield f"of {blocks} of {sizes} tokens in {prompts}"
    if figures.sessions is not None:
        yield _sessions(figures.sessions)


def rate_plot(arrivals: ArrivalFigures, width: int) -> str:
    """Requests/s over the time of the trace in `width` columns of characters."""
    import plotext

    middles_s = [(i + 0.5) * arrivals.bin_s for i in range(len(arrivals.requests_per_bin))]
    rates = [count / arrivals.bin_s for count in arrivals.requests_per_bin]
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, PLOT_HEIGHT)
    figure.title(f"requests/s over s, in bins of {arrivals.bin_s:.3g} s")
    figure.draw(figure.signal(middles_s, rates).lines().fillx())
    for axis, highest in (("x", arrivals.span_s), ("y", max(rates))):
        figure.ruler(axis).lim(0, highest)
        places = round_ticks(highest)
        figure.ruler(axis).ticks(places, [f"{place:g}" for place in places])
    plot: str = figure.build().string(True)
    return plot


def round_ticks(highest: float) -> list[float]:
    """At most six round numbers from 0 to `highest`, which is above 0."""
    power = 10.0 ** floor(log10(highest))
    step = next(s * power for s in (0.2, 0.5, 1.0, 2.0) if highest <= 5 * s * power)
    return [i * step for i in range(int(highest / step) + 1)]


def _read_as(about: Mapping[str, Any]) -> str:
    """What the file does not say itself and was assumed or told."""
    said = {"time_unit": "times in {}", "block_size": "{} tokens per prefix id"}
    found = [words.format(about[name]) for name, words in said.items() if name in about]
    return f" ({', '.join(found)})" if found else ""


def _rows(figures: TraceFigures) -> Table:
    trace = figures.trace
    table = Table("rows", "", "first ones")
    table.columns[1].justify = "right"
    table.add_row("read", f"{trace.rows_read:,}", "")
    table.add_row("emitted", f"{trace.rows_emitted:,}", "")
    for reason, count in trace.rows_dropped.items():
        examples = [offence for offence in trace.offences if offence.reason == reason]
        said = [f"row {o.row}" if o.detail == reason else f"row {o.row}: {o.detail}" for o in examples]
        # A detail is a sentence of its own; plain row numbers go in one line.
        together = ("\n" if any(o.detail != reason for o in examples) else ", ").join(said)
        table.add_row(Text(f"dropped: {reason}"), f"{count:,}", Text(together))
    return table


def _arrivals(a: ArrivalFigures) -> Table:
    table = _figures_table("Arrivals")
    table.add_row("span", f"{a.span_s:,.6g} s")
    table.add_row("rate (requests / span)", f"{a.rate_per_s:,.4g} requests/s")
    table.add_row("CV of gaps (Poisson: 1)", f"{a.gap_cv:.3g}")
    table.add_row("index of dispersion at 1 s (Poisson: 1)", f"{a.dispersion_1s:.3g}")
    if a.peak_to_mean_minute is not None:
        table.add_row("peak / mean minute", f"{a.peak_to_mean_minute:.3g}")
    return table


def _lengths(figures: TraceFigures) -> Table:
    correlation = figures.length_correlation
    said = "not defined" if correlation is None else f"{correlation:.2f}"
    table = Table(title=f"Lengths in tokens (correlation {said})", title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for title, summary in (("prompt", figures.prompt_tokens), ("output", figures.output_tokens)):
        table.add_row(title, *(f"{v:,.1f}" for v in (summary.mean, summary.p50, summary.p90, summary.p99)))
    return table


def _prefix(p: PrefixFigures) -> Table:
    table = Table(title="Prefix reuse", title_justify="left")
    for name in ("cache", "blocks found", "tokens found"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    rates = {"infinite": p.infinite, **{f"LRU, {size:,} blocks": rate for size, rate in p.lru.items()}}
    for name, rate in rates.items():
        table.add_row(name, f"{rate.block_hit_percent:.2f} %", f"{rate.token_hit_percent:.2f} %")
    return table


def _sessions(s: SessionFigures) -> Table:
    table = _figures_table("Sessions")
    table.add_row("sessions", f"{s.sessions:,} with {counted(s.requests, 'request')}")
    if s.rate_per_s is not None:
        table.add_row("rate (sessions / span of their starts)", f"{s.rate_per_s:,.4g} sessions/s")
    table.add_row("turns p50/p90/max", f"{s.turns.p50:g} / {s.turns.p90:g} / {s.max_turns:,}")
    think = s.think_time_s
    said = "unknown" if think is None else f"{think.p50:.3g} / {think.p90:.3g} / {think.p99:.3g} s"
    table.add_row("think time p50/p90/p99", said)
    context = s.context_token_percent
    said = "unknown" if context is None else f"{context:.1f} % of prompt tokens"
    table.add_row("context of the turn before", said)
    return table


def _figures_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    return table
