"""What `servetwin trace fit` does: read, fit, write, say what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.show import print_json, results_console, say
from servetwin.sim.commands.trace_comparison import comparison_table
from servetwin.sim.commands.trace_flags import ReadFlags
from servetwin.sim.commands.trace_making import options_of
from servetwin.workloads import Tolerance, read_trace
from servetwin.workloads.fit_lengths import PairedLengthsModel, QuantileLengthsModel
from servetwin.workloads.fitted import FittedModel, fit_trace
from servetwin.workloads.fitted_arrivals import ArrivalsModel
from servetwin.workloads.two_sample import TwoSampleReport, two_sample


@dataclass(frozen=True)
class FitRequest:
    """One command line of `trace fit`, as typed."""

    path: Path
    out: Path
    overwrite: bool
    check: bool
    json: bool
    seed: int
    read: ReadFlags


def carry_out(request: FitRequest) -> int:
    """Runs it and returns the exit code."""
    _check_out(request)
    trace = read_trace(request.path, options_of(request.read, Tolerance.NORMAL, request.seed))
    model = fit_trace(trace)
    model.save(request.out)
    report = None
    if request.check:
        # A trace without times is compared in everything else.
        rate = float("inf") if model.arrivals is None else None
        report = two_sample(trace.requests, model.draw(rate_per_s=rate, seed=request.seed))
    for note in model.notes:
        say(note)
    if request.json:
        print_json(_as_json(request.out, model, report))
        return 0
    console = results_console()
    for line in (
        f"{request.out}: fitted to {model.fitted_to.rows:,} requests of {request.path}",
        *_told(model),
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if report is not None:
        console.print(comparison_table(report, "trace", "model"))
        for note in report.notes:
            say(note)
    return 0


def _check_out(request: FitRequest) -> None:
    if request.out.suffix != ".json":
        raise UsageError(f"--out {request.out}: the name must end in .json")
    if request.out.exists() and not request.overwrite:
        raise UsageError(f"--out {request.out}: exists; --overwrite replaces it")
    if not request.out.parent.is_dir():
        raise UsageError(f"--out {request.out}: there is no folder {request.out.parent}")


def _as_json(out: Path, model: FittedModel, report: TwoSampleReport | None) -> dict[str, Any]:
    fitted = {"path": str(out), "model": model.model_dump(mode="json")}
    return fitted if report is None else {**fitted, "check": report.as_json()}


def _told(model: FittedModel) -> Iterator[str]:
    yield f"arrivals: {'unknown' if model.arrivals is None else _arrivals(model.arrivals)}"
    if model.lengths is not None:
        yield f"lengths: {_lengths(model.lengths)}"
    if model.sessions is not None:
        sessions = model.sessions
        yield f"sessions: first turns: {_lengths(sessions.first)}; later turns add: {_lengths(sessions.later)}"
        pauses = (
            "unknown"
            if sessions.pauses is None
            else f"from {sessions.pauses.between}".replace(" and ", " to ")
        )
        yield f"sessions: context {'unknown' if sessions.context_share is None else 'kept in part'}, pauses {pauses}"
    yield f"prefixes: {'reuse unknown' if model.prefixes is None else model.prefixes.model.kind}"


def _arrivals(arrivals: ArrivalsModel) -> str:
    steps = len(arrivals.rates_per_s)
    rate = sum(arrivals.rates_per_s) / steps
    profile = "a constant rate" if steps == 1 else f"{steps} steps of {arrivals.step_s:,.4g} s"
    fields = arrivals.process.model_dump(exclude={"kind", "quantiles"})
    shown = "".join(f", {name} {_short(value)}" for name, value in fields.items())
    return f"{arrivals.process.kind}{shown}, {rate:,.4g}/s on average, {profile}"


def _short(value: Any) -> str:
    return " and ".join(f"{v:.4g}" for v in value) if isinstance(value, tuple) else f"{value:.4g}"


def _lengths(lengths: QuantileLengthsModel | PairedLengthsModel) -> str:
    if isinstance(lengths, PairedLengthsModel):
        return f"{len(lengths.prompt_tokens):,} observed pairs"
    return f"quantiles, rank correlation {lengths.rank_correlation:.2f}"
