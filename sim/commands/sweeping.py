"""What `servetwin sweep` does: check, run, write, show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.interrupt import StopRequest
from servetwin.sim.commands.show import print_json, say
from servetwin.sim.commands.sweep import SweepFlags
from servetwin.sim.commands.sweep_report import SweepProgress, describe, seeds_are_alike, show, show_plan
from servetwin.sim.planning.backends import Backend, default_jobs
from servetwin.sim.planning.definition import SweepDefinition
from servetwin.sim.planning.folder import RUNS, begin, check_folder
from servetwin.sim.planning.named_files import FileDigests
from servetwin.sim.planning.parameters import read_parameters
from servetwin.sim.planning.results import RESULTS, write_results
from servetwin.sim.planning.running import open_backend
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.store import FolderStore, MemoryStore, Store
from servetwin.sim.planning.sweep import Ended, Sweep, check_start

WRITTEN_EVERY_S = 5.0
"""The table, for whoever looks at it while the sweep goes on."""


def carry_out(base: RunSpec, flags: SweepFlags) -> int:
    """Runs it and returns the exit code."""
    definition = _definition(base, flags)
    known = FileDigests()
    if flags.out is not None:
        check_folder(flags.out, definition, known, resume=flags.resume)
    store = _store(flags)
    planned = Sweep(definition, store, known).first()
    missing = [run for run in planned if store.get(run.spec_hash) is None]
    # Also where nothing is left to do: what the figures rest on belongs to every showing of them.
    for note in check_start(missing or planned):
        say(note)
    sweep = Sweep(definition, store, known)
    if flags.dry_run:
        return show_plan(sweep, planned, len(planned) - len(missing), json=flags.json)
    assert flags.out is not None, "checked before"
    with StopRequest() as stop:
        backend = open_backend(
            flags.backend, flags.ray_address, flags.jobs, sweep.num_runs, stop.raise_if_asked
        )
        try:
            begin(flags.out, definition, known)
            say(_line(sweep, flags))
            counts = _run(sweep, backend, flags.out, stop)
        finally:
            backend.close()
    results = sweep.results()
    if seeds_are_alike(results):
        say("note: all seeds gave the same figures: nothing in these runs is drawn at random")
    if flags.json:
        print_json(describe(results) | {"out": str(flags.out)} | counts)
    else:
        show(results, flags.out / RESULTS)
    return 1 if counts["failed"] else 0


def _definition(base: RunSpec, flags: SweepFlags) -> SweepDefinition:
    if flags.jobs is not None and flags.jobs < 1:
        raise UsageError(f"--jobs {flags.jobs}: must be 1 or more")
    if flags.ray_address is not None and flags.backend != "ray":
        raise UsageError("--ray-address goes with --backend ray")
    if flags.direction != "minimize" and flags.objective is None:
        raise UsageError(f"--direction {flags.direction} goes with --objective")
    if flags.out is None and not flags.dry_run:
        raise UsageError("--out DIR is missing: the folder for results.parquet")
    if flags.out is None and flags.resume:
        raise UsageError("--resume needs --out: the folder of the sweep to go on with")
    return SweepDefinition(
        base,
        read_parameters(flags.param),
        flags.method,
        flags.runs,
        flags.seeds,
        flags.objective,
        flags.direction,
    )


def _store(flags: SweepFlags) -> Store:
    if flags.store is not None:
        if flags.store.exists() and not flags.store.is_dir():
            raise UsageError(f"--store {flags.store} is a file; finished runs need a folder")
        return FolderStore(flags.store)
    return MemoryStore() if flags.out is None else FolderStore(flags.out / RUNS)


def _line(sweep: Sweep, flags: SweepFlags) -> str:
    points, seeds, jobs = sweep.num_points, sweep.definition.seeds, flags.jobs
    where = "on a Ray cluster" if flags.backend == "ray" else f"{jobs or default_jobs()} at a time"
    return f"sweep: {points:,} points x {seeds:,} seeds = {sweep.num_runs:,} runs, {where}"


def _run(sweep: Sweep, backend: Backend, out: Path, stop: StopRequest) -> dict[str, int]:
    """Runs what is missing, writes the table, and counts."""
    counts = {"done": 0, "failed": 0, "reused": 0}
    written_s = monotonic()
    with SweepProgress(sweep.num_runs) as progress, _table_at_the_end(sweep, out):

        def on_ended(ended: Ended) -> None:
            nonlocal written_s
            counts["failed" if ended.record.error else "done"] += 1
            counts["reused"] += ended.reused
            progress.ended(ended)
            stop.raise_if_asked()
            if not ended.reused and monotonic() - written_s > WRITTEN_EVERY_S:
                write_results(out / RESULTS, sweep.table())
                written_s = monotonic()

        sweep.run(backend, on_ended)
    return counts


@contextmanager
def _table_at_the_end(sweep: Sweep, out: Path) -> Iterator[None]:
    """The table is written however the sweep ends; of one broken off with what had ended."""
    try:
        yield
    except BaseException:
        write_results(out / RESULTS, sweep.table())
        say(f"{out} holds what had ended until then; --resume goes on")
        raise
    write_results(out / RESULTS, sweep.table())
