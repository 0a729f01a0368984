"""Measured steps one by one: what a step model gives for their batches, whatever it would have scheduled itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.errors import Errors
from servetwin.sim.steptime.features import REGIMES, Bools, StepModel, regimes_of
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.tables import Tables
from servetwin.sim.validation.like_steps import medians_of_like

Floats = NDArray[np.float64]
ALL, OUTSIDE = "all", "outside"
"""Steps of all regimes inside the measured region of the model; those of any regime outside it."""
LEAST = 20
"""Like steps from which on their spread is told."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Of the steps of one regime. All but `prepare` are about device time."""

    device: Errors
    total_percent: float
    """Error of the sum of their times: what it does to the run."""
    prepare: Errors | None
    """Host time before the device; None where the model has none."""
    like: Errors | None
    """Each step foretold by the median of its like ones in the same run: what no model beats. None: too few."""
    again: Errors | None
    """The same by the like ones of a second measured run: bias = what the two differ by. None: no such run, too few."""

    def to_json(self) -> dict[str, Any]:
        parts = {"prepare": self.prepare, "like_steps": self.like, "again": self.again}
        return {
            **self.device.to_json(),
            "total_percent": self.total_percent,
            **{name: None if part is None else part.to_json() for name, part in parts.items()},
        }


def measured_steps(log: Tables | None) -> MeasuredSteps | None:
    """The steps with tokens of a run; None where nobody says their times and shapes (runs of earlier versions)."""
    steps = None if log is None else MeasuredSteps.of_run(log.steps)
    return steps if steps else None


def step_errors(
    steps: MeasuredSteps, model: StepModel, again: MeasuredSteps | None = None
) -> dict[str, StepErrors]:
    """By regime, then `ALL` of them and those `OUTSIDE` the region that the model was measured in, if there are any.

    `again`: the steps of a second measured run of the same load.
    """
    features = steps.features
    foretold = model.durations_ns(features) / 1e3
    prepare = model.prepare_ns(features) / 1e3 if hasattr(model, "prepare_ns") else None
    outside = np.zeros(len(steps), dtype=bool)
    if hasattr(model, "outside"):
        outside = model.outside(features)
    like = medians_of_like(steps, steps)
    second = None if again is None else medians_of_like(steps, again)
    regimes = regimes_of(features)
    parts = {name: (regimes == name) & ~outside for name in REGIMES} | {ALL: ~outside, OUTSIDE: outside}
    found = {}
    for name, part in parts.items():
        device = Errors.of(foretold[part], steps.device_us[part])
        if device is not None:
            found[name] = StepErrors(
                device,
                100 * float(foretold[part].sum() / steps.device_us[part].sum() - 1),
                None if prepare is None else _known(prepare, steps.prepare_us, part, 1),
                _known(like, steps.device_us, part, LEAST),
                None if second is None else _known(second, steps.device_us, part, LEAST),
            )
    return found


def _known(foretold: Floats, measured: Floats, part: Bools, least: int) -> Errors | None:
    """None where fewer than `least` steps are known on both sides."""
    known = part & ~np.isnan(foretold) & (measured > 0)
    return Errors.of(foretold[known], measured[known]) if known.sum() >= least else None
