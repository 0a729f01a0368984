"""The torch executor measures single steps for a profile (the `sim.profiler.StepProfiler` protocol)."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from servetwin.executor.profile_design import designed_points
from servetwin.executor.profile_grid import GridLimits, GridPoint, measure_point
from servetwin.executor.step_timer import build_torch_executor
from servetwin.sim.config import ExecutorOptions


class TorchProfiler:
    """An engine's worker without an engine. Raises ValueError for options that cannot be served."""

    def __init__(self, options: ExecutorOptions) -> None:
        self._timer = build_torch_executor(options)
        self._limits = GridLimits.of(self._timer.runner, options.max_num_batched_tokens)
        self.model_config = self._timer.model_config

    @property
    def limits(self) -> dict[str, int]:
        """Of a step: the fields of `GridLimits`."""
        return asdict(self._limits)

    def describe(self) -> dict[str, Any]:
        """Hardware, versions and model."""
        return self._timer.describe()

    def design(self, count: int, seed: int) -> Sequence[GridPoint]:
        """At most so many steps to measure (`profile_design.designed_points`)."""
        graphs = self._timer.runner.decode_graphs
        return designed_points(self._limits, count, seed, () if graphs is None else graphs.sizes)

    def measure(self, point: GridPoint, repetitions: int, budget_s: float) -> dict[str, Any]:
        """A row as `profile_grid` describes it; fewer repetitions, but one, where they would take longer."""
        return measure_point(self._timer.runner, point, repetitions, budget_s)

    def close(self) -> None:
        """Gives the memory back, the device's, too: a live engine is to have it next."""
        self._timer.close()
        del self._timer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
