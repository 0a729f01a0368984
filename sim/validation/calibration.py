"""One number fitted to the first half of a measured run, so that the second half can test it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import numpy as np

from servetwin.sim.steptime.features import StepModel
from servetwin.sim.validation.measured import MeasuredRun, MeasuredRunError, metrics_of
from servetwin.sim.validation.replay import SimulatedRun

LOWEST, HIGHEST = 0.5, 2.0
"""Factors beyond which a profile is of something else."""
TOLERANCE = 5e-4
"""Relative error of the mean TPOT that is left."""
MOST_TRIES = 8


class Scalable(StepModel, Protocol):
    """A step model with a factor that may be calibrated."""

    def scaled(self, factor: float, /) -> Self: ...


def first_half(run: MeasuredRun) -> slice:
    """The requests that are fitted to, in order of arrival."""
    return slice(0, len(run.requests) // 2)


def second_half(run: MeasuredRun) -> slice:
    """Those that test the fit."""
    return slice(len(run.requests) // 2, None)


def calibrate(
    run: MeasuredRun,
    replay: Callable[[StepModel], SimulatedRun],
    model: Scalable,
    on_try: Callable[[float], None] = lambda factor: None,
) -> float:
    """The factor with which the mean TPOT of the first half is the measured one.

    `replay` simulates the whole run, for each try: later requests weigh on earlier ones. Raises MeasuredRunError where
    no factor between `LOWEST` and `HIGHEST` gives it.
    """
    part = first_half(run)
    wanted = float(np.nanmean(metrics_of(run.requests)["tpot"][part]))

    def error(factor: float) -> float:
        on_try(factor)
        again = replay(model.scaled(factor))
        return float(np.nanmean(metrics_of(again.requests)["tpot"][part])) / wanted - 1

    return _root(error)


def _root(error: Callable[[float], float]) -> float:
    """By the secant method: the error grows with the factor, nearly in proportion."""
    old, old_error = 1.0, error(1.0)
    new = min(max(1 / (1 + old_error), LOWEST), HIGHEST)
    for _ in range(MOST_TRIES):
        if abs(old_error) < TOLERANCE or new == old:
            return old
        new_error = error(new)
        slope = (new_error - old_error) / (new - old)
        if slope <= 0:
            break
        old, old_error = new, new_error
        new = min(max(old - old_error / slope, LOWEST), HIGHEST)
    if abs(old_error) < 10 * TOLERANCE:
        return old
    raise MeasuredRunError(
        f"no factor between {LOWEST:g} and {HIGHEST:g} gives the measured time per token "
        f"(at {old:.4g} it is {100 * old_error:+.2f} % off): the profile is of another card or model"
    )
