"""What `servetwin fit` does: read the tables, check the fit on rows left out, write the profile, report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.fitting_steps import fit_steps
from servetwin.sim.commands.show import print_json, results_console
from servetwin.sim.steptime.kernel_tables import KernelTables, is_table_folder, read_tables
from servetwin.sim.steptime.kernel_times import KernelTimes
from servetwin.sim.steptime.profiles import KernelProfile, write_profile
from servetwin.sim.steptime.step_sources import is_step_folder
from servetwin.sim.steptime.table_check import TableCheck, check_tables


def carry_out(folders: Sequence[Path], out: Path | None, *, overwrite: bool, json: bool) -> int:
    """Raises UsageError and other ValueErrors: of tables, profiles and runs."""
    if out is not None:
        _check_target(out, overwrite)
    if any(is_step_folder(folder) for folder in folders):
        return fit_steps(folders, out, json=json)
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
        if not is_table_folder(folder):
            raise UsageError(
                f"{folder}: holds no profile (profile.json), no run (run.json) and no kernel tables (attention.csv)"
            )
    if len(folders) > 1:
        raise UsageError(
            f"{folders[1]}: tables are fitted alone; several folders must all hold measured steps"
        )
    return _fit_tables(folders[0], out, json=json)


def _fit_tables(folder: Path, out: Path | None, *, json: bool) -> int:
    tables = read_tables(folder)
    KernelTimes.of(tables)
    checks = check_tables(tables)
    if out is not None:
        errors, today = [check.to_json() for check in checks], date.today().isoformat()
        write_profile(KernelProfile.of(tables, errors, today), out)
    if json:
        print_json(_as_json(tables, checks, out))
        return 0
    console = results_console()
    console.print(_about(tables))
    console.print(_table(checks))
    if out is not None:
        console.print(f"wrote {out}")
    return 0


def _check_target(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; the profile is one file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: its folder does not exist")
    if out.exists() and not overwrite:
        raise UsageError(f"--out {out}: exists; --overwrite replaces it")


def _as_json(tables: KernelTables, checks: Sequence[TableCheck], out: Path | None) -> dict[str, object]:
    return {
        "folder": tables.path,
        "about": tables.about,
        "rows": _rows(tables),
        "errors": [check.to_json() for check in checks],
        "profile": None if out is None else str(out),
    }


def _rows(tables: KernelTables) -> dict[str, int]:
    counts = {
        "attention": len(tables.attention),
        "dense": sum(map(len, tables.dense.values())),
        "per_sequence": sum(map(len, tables.per_sequence.values())),
    }
    return counts if tables.skew is None else counts | {"skew": len(tables.skew)}


def _about(tables: KernelTables) -> str:
    about, rows = tables.about, ", ".join(f"{name} {count:,}" for name, count in _rows(tables).items())
    words = [about.get("gpu"), about.get("model"), about.get("variant")]
    measured = f"vLLM {about['vllm_version']}" if "vllm_version" in about else None
    said = ", ".join(str(word) for word in (*words, measured, about.get("profiled_at")) if word)
    return f"{tables.path}: {said or 'nothing says what was measured'}\nrows: {rows}"


def _table(checks: Sequence[TableCheck]) -> Table:
    table = Table(
        title="Errors on rows left out of the fit, in percent",
        caption="every 4th row: the worst of four places to begin at; physics: the mean error without interpolation",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("left out", no_wrap=True)
    for name in ("rows", "mean", "median", "P90", "P99", "bias", "physics"):
        table.add_column(name, justify="right")
    for check in checks:
        e = check.errors
        physical = "" if check.physical is None else f"{check.physical.mape:.1f}"
        figures = (f"{e.mape:.2f}", f"{e.median:.2f}", f"{e.p90:.1f}", f"{e.p99:.1f}", f"{e.bias:+.2f}")
        table.add_row(f"{check.name}: {check.what}", f"{e.n:,}", *figures, physical)
    return table
