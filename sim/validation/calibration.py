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
ACCEPTED = 0.02
"""The same, where no factor comes nearer: the time per token goes up in jumps."""
FACTOR_TOLERANCE = 2e-4
FIRST_WIDTH = 0.02
"""How far from a first guess the factor is looked for at first, relative."""
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
    """The error grows with the factor nearly in proportion, in jumps: a step sooner or later changes what follows."""
    from scipy.optimize import brentq

    tried = {1.0: error(1.0)}

    def remembered(factor: float) -> float:
        if factor not in tried:
            tried[factor] = error(factor)
        return tried[factor]

    guess = _within(1 / (1 + tried[1.0]))
    if abs(remembered(guess)) >= TOLERANCE:
        ends = _bracket(remembered, guess)
        if ends is not None:
            brentq(remembered, *ends, xtol=FACTOR_TOLERANCE, maxiter=MOST_TRIES, disp=False)
    best = min(tried, key=lambda factor: abs(tried[factor]))
    if abs(tried[best]) > ACCEPTED:
        raise MeasuredRunError(
            f"no factor between {LOWEST:g} and {HIGHEST:g} gives the measured time per token "
            f"(at {best:.4g} it is {100 * tried[best]:+.2f} % off): the profile is of another card or model"
        )
    return best


def _bracket(error: Callable[[float], float], guess: float) -> tuple[float, float] | None:
    """Factors with errors of both signs, from the guess outwards; None: there are none between the bounds."""
    up = error(guess) < 0
    width = FIRST_WIDTH
    while True:
        other = _within(guess * (1 + width) if up else guess / (1 + width))
        if (error(other) < 0) != up:
            return guess, other
        if other in (LOWEST, HIGHEST):
            return None
        width *= 4


def _within(factor: float) -> float:
    return min(max(factor, LOWEST), HIGHEST)
