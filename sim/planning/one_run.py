"""One simulated run as a pure function of its spec: the same result in any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servetwin.sim.commands.engine import Engine, build_engine
from servetwin.sim.commands.errors import policy_errors_told
from servetwin.sim.commands.running import RunRequest, run_config, simulate_request
from servetwin.sim.commands.show import listening
from servetwin.sim.config import RunConfig
from servetwin.sim.events import MemorySink
from servetwin.sim.leaping_process import OnProgress
from servetwin.sim.metrics import summarize
from servetwin.sim.planning.spec import RunSpec
from servetwin.sim.tables import Tables
from servetwin.workloads import ClosedLoop, ListWorkload


class EndRun(Exception):
    """Raised by whoever watches a run to end it: its result tells how far it had come."""


@dataclass(frozen=True)
class RunResult:
    """What came of a run."""

    summary: dict[str, Any]
    """As in `summary.json`."""
    end_ns: int
    """Simulated time of the end."""
    notes: tuple[str, ...]
    """What `servetwin run` would have said on stderr of what was assumed or has no effect."""
    config: RunConfig
    """As in `run.json`."""
    log: Tables
    """Its tables."""
    ended_early: str | None = None
    """Why it was ended before all requests were served, in the words of the EndRun; None: it came to its end."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start; it can be started once."""

    request: RunRequest
    config: RunConfig
    workload: ListWorkload | ClosedLoop
    engine: Engine
    notes: tuple[str, ...]


def prepare(spec: RunSpec) -> PreparedRun:
    """Opens the workload and builds the engine as `servetwin run` does. Raises what that ends with."""
    spec.check()
    notes: list[str] = []
    request = spec.request()
    with listening(notes.append):
        workload = request.load.open(spec["seed"])
        engine = build_engine(request.engine, spec["executor"], spec["step_time_s"], spec["seed"])
    about = workload.about
    notes += [f"note: {text}" for text in (*about.get("notes", ()), *engine.notes)]
    notes += [f"assumed: {text}" for text in engine.assumed]
    return PreparedRun(request, run_config(request, engine), workload, engine, tuple(notes))


def run_one(
    spec: RunSpec,
    *,
    on_progress: OnProgress | None = None,
    log_blocks: bool = False,
    prepared: PreparedRun | None = None,
) -> RunResult:
    """Simulates the run with modelled step times, its log in memory.

    `on_progress(steps, ended, now_ns)`: told of new steps, of requests that ended with them, and of the simulated time;
    it ends the run by raising EndRun. `prepared`: from `prepare(spec)`, where that was wanted before.
    Raises ValueError (UsageError, WorkloadError ...), InfeasibleError or PolicyFailedError as `servetwin run` does.
    """
    prepared = prepared or prepare(spec)
    engine, sink = prepared.engine, MemorySink()
    ended_early: str | None = None
    progress = _Progress(on_progress)
    try:
        with policy_errors_told(prepared.config.engine.scheduler.policy):
            end_ns = simulate_request(
                prepared.request,
                prepared.config,
                prepared.workload,
                engine,
                sink,
                log_blocks=log_blocks,
                on_progress=progress,
            )
    except EndRun as e:
        ended_early, end_ns = str(e) or "ended early", progress.now_ns
    finally:
        engine.close()
    summary = summarize(sink, spec["metric_defs"])
    if engine.notes:
        summary["servetwin"]["notes"] = list(engine.notes)
    return RunResult(summary, end_ns, prepared.notes, prepared.config, sink, ended_early)


class _Progress:
    """Passes on what is told, and knows the time of the last of it."""

    def __init__(self, told: Callable[[int, int, int], None] | None) -> None:
        self._told = told
        self.now_ns = 0

    def __call__(self, num_steps: int, num_ended: int, now_ns: int) -> None:
        self.now_ns = now_ns
        if self._told is not None:
            self._told(num_steps, num_ended, now_ns)
