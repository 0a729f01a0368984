"""Sweeps from Python, with the flags of the command line as keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from servetwin.sim.planning.answer import Plan, plan_of
from servetwin.sim.planning.definition import SweepDefinition
from servetwin.sim.planning.folder import RUNS, begin, check_folder
from servetwin.sim.planning.named_files import FileDigests
from servetwin.sim.planning.parameters import parameters_of
from servetwin.sim.planning.proposals import Direction, Method
from servetwin.sim.planning.results import RESULTS, write_results
from servetwin.sim.planning.running import open_backend
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.planning.store import FolderStore, MemoryStore, Store
from servetwin.sim.planning.sweep import Sweep, check_start

if TYPE_CHECKING:
    import pandas as pd


class Study:
    """A workload and an engine to be studied.

    `workload`: a path or a preset's name. Flags of `servetwin run` are keywords, with underscores:
    `Study("chat", executor="constant", step_time_s=0.02, max_num_seqs=64)`; `vllm_args` may be a `vllm serve` line.
    Raises ValueError (a UsageError) for unknown names and values that the command line would refuse.
    """

    def __init__(self, workload: str | Path | None = None, **flags: Any) -> None:
        self.spec = RunSpec.from_fields(workload, **flags)

    def sweep(
        self,
        parameters: Mapping[str, Sequence[Any] | str],
        *,
        seeds: int = 1,
        method: Method = "grid",
        runs: int | None = None,
        objective: str | None = None,
        direction: Direction = "minimize",
        jobs: int = 1,
        backend: Literal["local", "ray"] = "local",
        ray_address: str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        store: str | Path | None = None,
    ) -> pd.DataFrame:
        """One row a run, in the order of the plan, with the columns of `servetwin sweep` (`p99_ttft_ms` ...).

        `parameters`: field -> values, or a text as behind --param's `=` ("64,128", "1..10:log"). The rest is as on the
        command line; without `out` nothing is written. A run that fails is a row with `state` "failed" and its `error`.
        With `jobs` above 1 the calling script needs the usual `if __name__ == "__main__":`.
        Raises ValueError, InfeasibleError where no run can start, RunFolderError for an `out` that cannot be used.
        """
        definition = SweepDefinition(
            self.spec, parameters_of(parameters), method, runs, seeds, objective, direction
        )
        known, folder = FileDigests(), None if out is None else Path(out)
        if folder is not None:
            check_folder(folder, definition, known, resume=resume)
        kept = self._store(folder, store)
        missing = [run for run in Sweep(definition, kept, known).first() if kept.get(run.spec_hash) is None]
        if missing:
            check_start(missing)
        sweep = Sweep(definition, kept, known)
        running = open_backend(backend, ray_address, jobs, sweep.num_runs)
        if folder is not None:
            begin(folder, definition, known)
        try:
            sweep.run(running)
        finally:
            running.close()
            if folder is not None:
                write_results(folder / RESULTS, sweep.table())
        return sweep.results().frame

    def plan(self, **question: Any) -> Plan:
        """As `servetwin.sim.planning.plan`, of this workload and engine: `ttft`, `target_rate`, `vary` ..."""
        return plan_of(self.spec, **question)

    @staticmethod
    def _store(folder: Path | None, store: str | Path | None) -> Store:
        if store is not None:
            return FolderStore(Path(store))
        return MemoryStore() if folder is None else FolderStore(folder / RUNS)
