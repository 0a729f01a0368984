"""What an engine can serve at most, by its step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from servetwin.sim.config import EngineConfig
from servetwin.sim.host_model import HostModel
from servetwin.sim.steptime.features import StepModel
from servetwin.sim.validation.replay import simulated
from servetwin.workloads import RequestSpec


def capacity_per_s(
    requests: Sequence[RequestSpec], engine: EngineConfig, model: StepModel, host: HostModel | None = None
) -> float:
    """Requests/s that end while the engine is never idle: all of them come at once."""
    at_once = [replace(spec, arrival_s=0.0) for spec in requests]
    return len(at_once) / float(simulated(at_once, engine, model, host).requests["last_token_s"].max())
