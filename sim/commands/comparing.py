"""What `servetwin compare` does: read both runs, pair, resample, judge, show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.show import print_json, results_console, say
from servetwin.sim.comparison import Comparison, Difference, compare_runs, configuration_differences
from servetwin.sim.definitions import DEFINITIONS
from servetwin.sim.planning.thresholds import Verdict, threshold
from servetwin.sim.runs import Run, RunFolderError, read_run

EXCEEDED = 4
SHOWN_LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue")
SHOWN_STATISTICS = ("mean", "median", "p90", "p99")
SHOWN_FIGURES = (
    "request_throughput",
    "output_throughput",
    "duration",
    "busy_time_s",
    "preemptions",
    "recomputed_tokens",
    "cached_prompt_fraction",
    "kv_peak_used_fraction",
)
LONGEST_VALUE = 60
"""Characters of a value of the configuration that are shown."""


def carry_out(
    a: Path,
    b: Path,
    *,
    fail_on: Sequence[str],
    metric_defs: str,
    confidence: float,
    resamples: int,
    seed: int,
    json: bool,
) -> int:
    """Raises UsageError and other ValueErrors: of rules, of folders, of runs that share no request."""
    if not 0 < confidence < 100:
        raise UsageError(f"--confidence {confidence:g}: must be above 0 and below 100")
    if resamples < 100:
        raise UsageError(f"--resamples {resamples}: must be 100 or more")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")
    if metric_defs not in DEFINITIONS:
        raise UsageError(f"--metric-defs {metric_defs!r}: must be one of {', '.join(DEFINITIONS)}")
    rules = [threshold(text) for text in fail_on]
    first, second = (_opened(path, strict=bool(rules)) for path in (a, b))
    comparison = compare_runs(
        first,
        second,
        [rule.name for rule in rules],
        metric_defs=metric_defs,
        level=confidence / 100,
        resamples=resamples,
        seed=seed,
    )
    verdicts = [rule.judge(comparison.differences[str(rule.name)]) for rule in rules]
    differences = configuration_differences(first, second)
    notes = [*_states(first, second), *_seeds(first, second), *comparison.notes]
    for note in notes:
        say(f"note: {note}")
    if json:
        print_json(
            {
                "a": _side(first),
                "b": _side(second),
                **comparison.to_json(),
                "configuration": {name: {"a": x, "b": y} for name, (x, y) in differences.items()},
                "fail_on": [verdict.to_json() for verdict in verdicts],
                "notes": notes,
            }
        )
    else:
        _show(first, second, comparison, differences, verdicts)
    return EXCEEDED if any(verdict.exceeded for verdict in verdicts) else 0


def _opened(path: Path, *, strict: bool) -> Run:
    run = read_run(path)
    if run.state == "running":
        raise RunFolderError(f"{path}: the run has not ended")
    if strict and run.state != "complete":
        raise RunFolderError(f"{path}: the run is {_state(run)}; --fail-on judges complete runs only")
    return run


def _state(run: Run) -> str:
    return f"failed ({run.reason})" if run.state == "failed" else run.state


def _states(*runs: Run) -> list[str]:
    return [f"{run.path}: the run is {_state(run)}" for run in runs if run.state != "complete"]


def _seeds(a: Run, b: Run) -> list[str]:
    seeds = [run.header.get("seed") for run in (a, b)]
    if seeds[0] == seeds[1]:
        return []
    return [f"the runs have different seeds ({seeds[0]}, {seeds[1]}): pairs share their ids, not their draws"]


def _side(run: Run) -> dict[str, Any]:
    counts = run.requests.finish_reason.fillna("open").value_counts().sort_index()
    return {
        "path": str(run.path),
        "state": run.state,
        "seed": run.header.get("seed"),
        "requests": {str(reason): int(count) for reason, count in counts.items()},
    }


# ---------------------------------------------------------------- for people


def _show(
    a: Run,
    b: Run,
    comparison: Comparison,
    differences: dict[str, tuple[Any, Any]],
    verdicts: Sequence[Verdict],
) -> None:
    console = results_console()
    lines = [f"A {a.path}", f"B {b.path}", f"{len(comparison.pairs):,} pairs of requests completed in both"]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(_latencies(comparison))
    console.print(_figures(comparison))
    console.print(_configuration(differences) if differences else "the configurations are equal")
    for verdict in verdicts:
        console.print(verdict.words, soft_wrap=True, markup=False, highlight=False)


def _latencies(comparison: Comparison) -> Table:
    level = f"{100 * comparison.level:g} % interval"
    formulas = "\n".join(f"{name} = {comparison.formulas[name]}" for name in SHOWN_LATENCIES)
    table = Table(
        title="Latencies in ms, of the pairs",
        caption=f"{formulas}\nintervals: bootstrap of blocks of {comparison.bootstrap.block_length} requests, "
        f"{comparison.bootstrap.resamples:,} resamples; itl is pooled over all requests, without pairs",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for column in ("A", "B", "B - A", level, "%"):
        table.add_column(column, justify="right")
    for quantity in SHOWN_LATENCIES:
        for statistic in SHOWN_STATISTICS:
            table.add_row(*_cells(comparison.differences[f"{statistic}_{quantity}"]))
        table.add_section()
    return table


def _cells(difference: Difference) -> list[str]:
    # Fractions lie between 0 and 1.
    digits = 4 if difference.name.unit == "1" else 2
    delta, interval = difference.delta, difference.interval
    return [
        str(difference.name),
        *("no data" if value is None else f"{value:,.{digits}f}" for value in (difference.a, difference.b)),
        "" if delta is None else f"{delta:+,.{digits}f}",
        "" if interval is None else f"{interval.low:+,.{digits}f} to {interval.high:+,.{digits}f}",
        "" if difference.delta_percent is None else f"{difference.delta_percent:+.1f}",
    ]


def _figures(comparison: Comparison) -> Table:
    table = Table(
        title="Figures of the whole runs", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    for column in ("A", "B", "B - A", "%"):
        table.add_column(column, justify="right")
    for name in SHOWN_FIGURES:
        difference = comparison.differences[name]
        unit = "" if difference.name.unit == "1" else f" ({difference.name.unit})"
        title, first, second, delta, _, percent = _cells(difference)
        table.add_row(title if name.endswith("_s") else f"{title}{unit}", first, second, delta, percent)
    return table


def _configuration(differences: dict[str, tuple[Any, Any]]) -> Table:
    table = Table(title="Configuration", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "A", "B"):
        table.add_column(column, overflow="fold")
    for name, values in differences.items():
        table.add_row(name, *(_shortened(value) for value in values))
    return table


def _shortened(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
