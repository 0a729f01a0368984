"""Which backend a sweep is run on."""

from __future__ import annotations

from typing import Literal

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.planning.backends import Backend, InProcess, OnWait, Processes, default_jobs
from servetwin.sim.planning.ray_backend import RayCluster


def open_backend(
    name: Literal["local", "ray"],
    ray_address: str | None,
    jobs: int | None,
    num_runs: int,
    on_wait: OnWait = lambda: None,
) -> Backend:
    """`jobs`: runs at one time (None: one for each processor). Raises UsageError, ConnectionError."""
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: must be 1 or more")
    if name == "ray":
        return RayCluster(ray_address, jobs, on_wait)
    if name != "local":
        raise UsageError(f"--backend {name}: must be local or ray")
    if ray_address is not None:
        raise UsageError("--ray-address goes with --backend ray")
    jobs = min(jobs or default_jobs(), num_runs)
    return InProcess(on_wait) if jobs == 1 else Processes(jobs, on_wait)
