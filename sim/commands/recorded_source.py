"""`--executor recorded:RUN`: every step takes the time that it took in an earlier run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from servetwin.sim.commands.errors import UsageError
from servetwin.sim.commands.flags import EngineFlags
from servetwin.sim.commands.show import say
from servetwin.sim.runs import Run, read_run

PREFIX = "recorded:"
_PLACES = {
    "max_num_seqs": ("scheduler", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler", "max_num_batched_tokens"),
    "async_scheduling": ("scheduler", "async_scheduling"),
    "num_gpu_blocks_override": ("cache", "num_gpu_blocks"),
    "max_model_len": ("model", "max_model_len"),
}
"""Flags without a default of their own -> where run.json says what they were."""


def recorded_run(executor: str) -> Run:
    """The run that is named. Raises UsageError, RunFolderError."""
    path = Path(executor.removeprefix(PREFIX))
    if not path.is_dir():
        raise UsageError(f"--executor {executor}: {path} is no folder")
    run = read_run(path)
    if run.state == "running":
        raise UsageError(f"--executor {executor}: the run has not ended")
    if run.steps.empty:
        raise UsageError(f"--executor {executor}: the run has no steps")
    return run


def with_recorded(flags: EngineFlags, run: Run) -> EngineFlags:
    """The flags, those that were not given being what they were in the recorded run."""
    engine: dict[str, Any] = run.config.get("engine", {})
    recorded = {name: engine.get(of, {}).get(key) for name, (of, key) in _PLACES.items()}
    missing = {n: v for n, v in recorded.items() if v is not None and getattr(flags, n) is None}
    if missing:
        said = ", ".join(f"{name} {value}" for name, value in missing.items())
        say(f"as in the recorded run: {said}")
    return replace(flags, **missing)
