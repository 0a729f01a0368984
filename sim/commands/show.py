"""What a person sees of a run in the terminal: progress on stderr, tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from servetwin.sim.units import ns_to_seconds

LATENCIES = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("e2el", "E2E"),
    ("ntpot", "NTPOT"),
    ("queue", "queue"),
)
HELD_BACK = (
    ("client_queue_time", "held back"),
    ("ttft_including_client_queue", "TTFT from arrival"),
    ("e2el_including_client_queue", "E2E from arrival"),
)
"""Where a client's own limit held requests back: those above count from the sending."""
RATES = (("output_throughput", "output throughput"), ("duration", "duration"))


_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def say(message: str) -> None:
    """One line on stderr, or to whoever `listening` is."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(message)
    else:
        print(message, file=sys.stderr)  # noqa: T201 - stderr is for people


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """What is said inside goes to `listener`: one run of many is not to talk of itself."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def command_name() -> str:
    """How this program was called, to be typed again."""
    called = Path(sys.argv[0])
    if called.name != "servetwin":
        return "servetwin"
    here = Path.cwd()
    return str(called.relative_to(here) if called.is_relative_to(here) else called)


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout."""
    import orjson

    sys.stdout.buffer.write(
        orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    )


SHOWN_EVERY_S = 0.1
"""Of the progress bar, which costs more than a simulated step."""


class RunProgress:
    """A progress bar of ended requests; steps and time on the run's own clock beside it."""

    def __init__(self, total: int, clock: str = "simulated") -> None:
        self._total = total
        self._steps = self._ended = 0
        self._due = 0.0
        fixed = Column(no_wrap=True)
        self._progress = Progress(
            TextColumn("serving", table_column=fixed),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.completed:.0f}/{task.total:.0f} requests", table_column=fixed),
            TextColumn("{task.fields[steps]} steps", table_column=fixed),
            TextColumn(f"{{task.fields[run_s]:.1f}} s {clock} in", table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, steps=0, run_s=0.0)

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def steps(self, num_steps: int, num_ended: int, now_ns: int) -> None:
        """So many steps more, with which `num_ended` requests finished, until time `now_ns`."""
        self._steps += num_steps
        self._ended += num_ended
        if monotonic() >= self._due:
            self._show(self._ended, now_ns)

    def done(self, now_ns: int) -> None:
        """Everything is served (refused and aborted requests included)."""
        self._show(self._total, now_ns)

    def _show(self, completed: int, now_ns: int) -> None:
        self._due = monotonic() + SHOWN_EVERY_S
        self._progress.update(self._task, completed=completed, steps=self._steps, run_s=ns_to_seconds(now_ns))


class PointProgress:
    """A progress bar of measured steps."""

    def __init__(self, total: int, completed: int = 0) -> None:
        fixed = Column(no_wrap=True)
        self._progress = Progress(
            TextColumn("measuring", table_column=fixed),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.completed:.0f}/{task.total:.0f} steps", table_column=fixed),
            TextColumn("{task.fields[kind]}", table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, completed=completed, kind="")

    def __enter__(self) -> PointProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, kind: str) -> None:
        """One more, of that kind."""
        self._progress.update(self._task, advance=1, kind=kind)


def results_console() -> Console:
    """Tables need 80 columns; a narrower terminal breaks their lines rather than their numbers."""
    return Console(width=max(Console().width, 80))


def results(summary: Mapping[str, Any], clock: str = "simulated") -> list[RenderableType]:
    """The figures of a run: latencies with formulas, load and cache, notes; `clock`: whose duration it is."""
    rates = summary["servetwin"]["formulas"]
    meant = Text("\n".join(f"{title} = {rates[key]}" for key, title in RATES), style="dim")
    notes = [Text(f"note: {note}") for note in summary["servetwin"].get("notes", ())]
    return [_latency_table(summary), _formulas(summary), "", _figures_table(summary, clock), meant, *notes]


def _formulas(summary: Mapping[str, Any]) -> Text:
    own = summary["servetwin"]
    formulas = {**own["formulas"], "e2el": own["formulas"].get("e2e", "")}
    shown = [(title, formulas[key]) for key, title in (*LATENCIES, *HELD_BACK) if formulas.get(key)]
    width = max(len(title) for title, _ in shown)
    lines = [f"{title:<{width}} = {formula}" for title, formula in shown]
    return Text("\n".join([f"percentiles: {own['percentile_method']}", *lines]), style="dim")


def _latency_table(summary: Mapping[str, Any]) -> Table:
    own = summary["servetwin"]
    table = Table(title=f"Latency in ms ({own['metric_defs']} definitions)", title_justify="left")
    table.add_column("")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for key, title in (*LATENCIES, *HELD_BACK):
        statistics = own["latency"].get(f"{key}_ms")
        if statistics is not None:
            cells = [_number(statistics.get(name)) for name in ("mean", "p50", "p90", "p99")]
            table.add_row(title, *cells)
    return table


def _figures_table(summary: Mapping[str, Any], clock: str) -> Table:
    own = summary["servetwin"]
    table = Table(title="Load and cache", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    ended = ", ".join(f"{count} {reason}" for reason, count in own["requests"].items() if count)
    table.add_row("requests", ended or "none")
    table.add_row(f"duration ({clock})", f"{_number(summary['duration'])} s")
    table.add_row("busy time", f"{_number(summary['busy_time_s'])} s in {own['steps']:,} steps")
    if own["leapt_steps"]:
        table.add_row("steps leapt over", f"{own['leapt_steps']:,} ({_percent(own['leapt_fraction'])})")
    table.add_row("request throughput", f"{_number(summary['request_throughput'])} requests/s")
    table.add_row("output throughput", f"{_number(summary['output_throughput'])} tokens/s")
    table.add_row("total throughput", f"{_number(summary['total_token_throughput'])} tokens/s")
    table.add_row("KV peak", _percent(own["kv_peak_used_fraction"]))
    table.add_row("preemptions", f"{own['preemptions']:,} ({own['recomputed_tokens']:,} tokens recomputed)")
    table.add_row(
        "prefix hits",
        f"{own['cached_prompt_tokens']:,} of {own['admitted_prompt_tokens']:,} prompt tokens "
        f"({_percent(own['cached_prompt_fraction'])})",
    )
    if (cluster := own.get("cluster")) is not None:
        table.add_row("replicas", _cluster(cluster))
    if outside := own["predicted_outside_steps"]:
        table.add_row(
            "outside the measured region", f"{outside:,} of {own['steps']:,} steps: their times are guesses"
        )
    if "spec_decode_acceptance_length" in summary:
        length, rate = summary["spec_decode_acceptance_length"], summary["spec_decode_acceptance_rate"]
        table.add_row("drafts accepted", f"{rate:.1f} % ({length:.2f} tokens per verification)")
    return table


def _cluster(figures: Mapping[str, Any]) -> str:
    """How many, how busy, and the share of the busiest."""
    uneven = figures["imbalance"]["busy_time_s"]
    return (
        f"{figures['replicas']} for {_number(figures['replica_hours'])} replica-hours, busy "
        f"{_percent(figures['utilization'])}, the busiest {_number(uneven)} x the mean"
    )


def _number(value: float | None) -> str:
    return (
        "no data" if value is None else f"{value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    )


def _percent(fraction: float | None) -> str:
    return "no data" if fraction is None else f"{100 * fraction:.1f} %"
