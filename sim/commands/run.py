"""`servetwin run`: a workload through the engine in simulated time."""

from __future__ import annotations

from servetwin.sim.commands.cluster_flags import ClusterFlags
from servetwin.sim.commands.config_file import ConfigFile
from servetwin.sim.commands.flags import EngineFlags, LoadFlags, RunFlags, SamplingFlags, WorkloadName
from servetwin.sim.commands.trace_flags import TraceFlags

# Frozen, and cyclopts shows these defaults in --help.
RUN, LOAD, TRACE = RunFlags(), LoadFlags(), TraceFlags()
CLUSTER, ENGINE, SAMPLING = ClusterFlags(), EngineFlags(), SamplingFlags()


def run(
    workload: WorkloadName = None,
    /,
    *,
    config: ConfigFile = None,
    flags: RunFlags = RUN,
    load: LoadFlags = LOAD,
    trace: TraceFlags = TRACE,
    cluster: ClusterFlags = CLUSTER,
    engine: EngineFlags = ENGINE,
    sampling: SamplingFlags = SAMPLING,
) -> int:
    """Serve a workload in simulated time (or on the wall clock: --live).

    Requests arrive, the scheduler (vLLM 0.22.0 V1) decides, the executor runs what it decided, and the time that took
    moves the simulated clock; idle time is skipped. Results go to stdout, progress to stderr.
    """
    del config  # `sim/cli.py` has read it.
    from servetwin.sim.commands.loading import Load
    from servetwin.sim.commands.running import RunRequest, carry_out

    return carry_out(RunRequest(Load(workload, load, trace), flags, engine, sampling, cluster))
