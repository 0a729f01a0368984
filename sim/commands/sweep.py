"""`servetwin sweep`: a workload with many configurations and seeds, and one table of all runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from servetwin.sim.commands.cluster_flags import ClusterFlags
from servetwin.sim.commands.config_file import ConfigFile
from servetwin.sim.commands.flag_kinds import count, flag, switch
from servetwin.sim.commands.flags import EngineFlags, LoadFlags, SamplingFlags, SimulationFlags, WorkloadName
from servetwin.sim.commands.trace_flags import TraceFlags

SWEEP = Group("Sweep", sort_key=-3)
RUNNING = Group("Where and how it runs", sort_key=-2)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """What varies, how often each point is run, and where the results go."""

    param: Annotated[
        tuple[str, ...],
        Parameter(
            "--param",
            group=SWEEP,
            negative=(),
            help="NAME=V1,V2: a field and its values, several times for several fields. NAME is any flag of `run` with "
            "_ for - (max_num_seqs=64,128; rate_scale=0.5,1,2; enable_prefix_caching=true,false), or workload. none: "
            "without a value; lists with spaces (cudagraph_capture_sizes=1 2,1 2 4). NAME=LOW..HIGH draws from a "
            "range, LOW and HIGH included, whole numbers where the flag takes whole ones; NAME=LOW..HIGH:log evenly by "
            "ratio.",
        ),
    ] = ()
    method: Annotated[
        Literal["grid", "random", "sobol", "optuna"],
        flag(
            SWEEP,
            "grid: all combinations of the values. random, sobol: --runs points drawn from ranges and values. optuna: "
            "--runs points, each batch of 4 chosen by what those before it gave (TPE).",
        ),
    ] = "grid"
    runs: Annotated[int | None, count(SWEEP, "Points to try with random, sobol and optuna.")] = None
    seeds: Annotated[
        int,
        count(
            SWEEP,
            "Every point is run with so many seeds, from --seed on: the same ones, so that points differ by nothing "
            "else.",
        ),
    ] = 1
    objective: Annotated[
        str | None,
        flag(
            SWEEP,
            "A column of the table, for example p99_ttft_ms (mean over the seeds): what optuna looks for, and by which "
            "the best point is named.",
        ),
    ] = None
    direction: Annotated[
        Literal["minimize", "maximize"], flag(SWEEP, "Whether the objective is to be small or large.")
    ] = "minimize"
    out: Annotated[
        Path | None,
        flag(
            RUNNING,
            "Folder for results.parquet, one row a run; a run that fails is a row with its error, and the exit code 1. "
            "Required, but for --dry-run.",
            "--out",
            "-o",
        ),
    ] = None
    resume: Annotated[
        bool,
        switch(
            RUNNING,
            "Go on with the same sweep in --out: what has ended is not done again (an empty or missing folder: begin).",
        ),
    ] = False
    store: Annotated[
        Path | None,
        flag(
            RUNNING,
            "Folder of finished runs that sweeps share, also at one time: a run whose flags, files and version are the "
            "same is taken from it (default: runs/ in --out).",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        count(
            RUNNING,
            "Runs at one time (default: one for each processor; with ray, of the cluster). The results do not depend "
            "on it.",
        ),
    ] = None
    backend: Annotated[
        Literal["local", "ray"],
        flag(RUNNING, "local: processes of this machine. ray: a Ray cluster that is there already."),
    ] = "local"
    ray_address: Annotated[
        str | None,
        flag(RUNNING, "HOST:PORT of the cluster (default: the one on this machine, or of RAY_ADDRESS)."),
    ] = None
    dry_run: Annotated[
        bool, switch(RUNNING, "Show the points, and how many runs would be done; do and write nothing.")
    ] = False
    json: Annotated[bool, switch(RUNNING, "Print the result as one JSON object.")] = False


# Frozen, and cyclopts shows these defaults in --help.
FLAGS, SIMULATION, LOAD, TRACE = SweepFlags(), SimulationFlags(), LoadFlags(), TraceFlags()
CLUSTER, ENGINE, SAMPLING = ClusterFlags(), EngineFlags(), SamplingFlags()


def sweep(
    workload: WorkloadName = None,
    /,
    *,
    config: ConfigFile = None,
    sweep: SweepFlags = FLAGS,
    flags: SimulationFlags = SIMULATION,
    load: LoadFlags = LOAD,
    trace: TraceFlags = TRACE,
    cluster: ClusterFlags = CLUSTER,
    engine: EngineFlags = ENGINE,
    sampling: SamplingFlags = SAMPLING,
) -> int:
    """Simulate a workload with many configurations, each with several seeds, and write one table of all runs.

    Every flag of `run` is the base, and --param varies any of them. Results are kept run by run: after a kill, --resume
    goes on. In results.parquet figures have the names and units of summary.json (p90_queue_ms: milliseconds); a run
    that fails is a row with its error. Exit code 1: some run failed.
    """
    del config  # `sim/cli.py` has read it.
    from servetwin.sim.commands.sweeping import carry_out
    from servetwin.sim.planning.spec import RunSpec

    base = RunSpec.of(
        workload, flags=flags, load=load, trace=trace, cluster=cluster, engine=engine, sampling=sampling
    )
    return carry_out(base, sweep)
