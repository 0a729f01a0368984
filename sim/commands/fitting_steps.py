"""What `servetwin fit` does with measured whole steps: fit, leave each run out in turn, write the profile, report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from servetwin.sim.commands.show import print_json, results_console
from servetwin.sim.steptime.host_times import HostTimes
from servetwin.sim.steptime.profiles import write_profile
from servetwin.sim.steptime.step_fit import HeldOut, StepFit, fit_sources
from servetwin.sim.steptime.step_sources import StepsSource, read_sources
from servetwin.sim.steptime.steps_profile import StepsProfile


def fit_steps(folders: Sequence[Path], out: Path | None, *, json: bool) -> int:
    """Raises StepSourceError, ProfileFolderError, RunFolderError, FitExtraMissingError (all ValueErrors)."""
    sources = read_sources(folders)
    fit = fit_sources(sources)
    profile = StepsProfile.of(sources, fit, date.today().isoformat())
    if out is not None:
        write_profile(profile, out)
    if json:
        shown = profile.model_dump(mode="json", exclude={"regression"})
        print_json({**shown, "calibrated": profile.calibrated, "profile": None if out is None else str(out)})
        return 0
    console = results_console()
    for part in _report(sources, fit, profile):
        console.print(part)
    if out is not None:
        console.print(f"wrote {out}")
    return 0


def _report(sources: Sequence[StepsSource], fit: StepFit, profile: StepsProfile) -> Iterator[RenderableType]:
    about = profile.about
    yield f"{about.get('model')}, {about.get('dtype')}, on {about.get('device')}"
    for source in sources:
        if source.unfinished is not None:
            yield Text(f"{source.path}: {source.unfinished}", style="yellow")
        what = "measured one by one" if source.kind == "points" else "of a run"
        yield f"  {len(source.steps):,} steps {what}: {source.path}"
    trusted = 0.0 if fit.regression.correction is None else fit.regression.trust
    yield (
        f"correction of the physical model applied to {100 * trusted:.0f} %; half of the steps it was fitted to lie "
        f"within {fit.spread_percent:.1f} %, which says nothing of others"
    )
    if fit.host is not None:
        yield _host(fit.host)
    if fit.held_out:
        yield _table(fit.held_out)
    yield _verdict(profile)


def _host(host: HostTimes) -> str:
    def us(ns: int) -> str:
        return f"{ns / 1e3:.0f}"

    return (
        f"host: schedule {us(host.schedule_base_ns)} us + {us(host.schedule_per_row_ns)} a row + "
        f"{us(host.schedule_per_new_ns)} a new request; update {us(host.update_base_ns)} us + "
        f"{us(host.update_per_row_ns)} a row; the worker between two steps {us(host.turnaround_ns)} us"
    )


def _verdict(profile: StepsProfile) -> Text:
    if profile.calibrated:
        return Text(f"calibrated: {profile.describe_error()}", style="green")
    return Text(
        f"{profile.describe_error()}: add runs with {' and '.join(profile.untested)} steps (`servetwin run --live`)",
        style="yellow",
    )


def _table(held_out: Sequence[HeldOut]) -> Table:
    table = Table(
        title="Errors in the device time of steps of runs left out of the fit, in percent",
        caption="physics: the mean error without the correction; outside: steps beyond the measured region",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("run left out", overflow="fold")
    for name in ("steps", "n", "mean", "median", "P90", "P99", "bias", "physics", "outside"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in held_out:
        e = row.errors
        figures = (f"{e.mape:.1f}", f"{e.median:.1f}", f"{e.p90:.1f}", f"{e.p99:.1f}", f"{e.bias:+.1f}")
        name = Path(row.run).name if row.regime == "all" else ""
        table.add_row(name, row.regime, f"{e.n:,}", *figures, f"{row.physical.mape:.1f}", f"{row.outside:,}")
    return table
