"""A fit of whole steps to all sources, and how well it foretells each run that was left out of it.

Runs on the wall clock say how long steps take where requests are served: a client and a scheduler want the processor,
too. Points of a profile, measured one by one, say how the time goes with the shape, over a far wider region. Points are
therefore brought to the level of the runs (factor and constant), and count like one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.errors import Errors
from servetwin.sim.steptime.features import REGIMES, StepFeatures, regimes_of
from servetwin.sim.steptime.host_times import HostTimes
from servetwin.sim.steptime.measured_steps import MeasuredSteps
from servetwin.sim.steptime.physical import PhysicalModel
from servetwin.sim.steptime.step_regression import StepRegression
from servetwin.sim.steptime.step_sources import StepsSource

Floats = NDArray[np.float64]
LEAST_TESTED = 10
"""Steps of a regime in a run that was left out, for an error to be worth its name."""
LEAST_STEPS = 20
"""Of a run, to say something about the level of the others."""


@dataclass(frozen=True)
class HeldOut:
    """One run, foretold by a fit to everything else."""

    run: str
    regime: str
    """One of REGIMES, or "all"."""
    errors: Errors
    physical: Errors
    """Of the physical model alone."""
    outside: int
    """Steps of these that lie outside the region that the fit was measured in."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "of": self.regime,
            **self.errors.to_json(),
            "physical_mape_percent": self.physical.mape,
            "outside": self.outside,
        }


@dataclass(frozen=True)
class StepFit:
    """The fit to all sources."""

    regression: StepRegression
    host: HostTimes | None
    level: tuple[float, float] | None
    """(factor, us) between points measured one by one and runs; None where there are not both."""
    held_out: tuple[HeldOut, ...]

    @property
    def untested(self) -> tuple[str, ...]:
        """Regimes of which no run that was left out has enough steps: for these nothing is known of the error."""
        tested = {h.regime for h in self.held_out if h.errors.n >= LEAST_TESTED}
        return tuple(regime for regime in REGIMES if regime not in tested)


def fit_sources(sources: Sequence[StepsSource]) -> StepFit:
    """Raises ValueError (FitExtraMissingError without scikit-learn)."""
    runs = [s for s in sources if s.kind == "run"]
    regression, level = _fit(sources)
    tables = [s.table for s in runs if s.table is not None]
    return StepFit(regression, HostTimes.of(tables), level, tuple(_held_out(sources)))


def _held_out(sources: Sequence[StepsSource]) -> Iterator[HeldOut]:
    """Of each run in turn, where something is left to fit to."""
    for run in (s for s in sources if s.kind == "run" and len(s.steps)):
        others = [s for s in sources if s is not run]
        if any(len(s.steps) for s in others):
            yield from errors_of(_fit(others)[0], run.path, run.steps)


def errors_of(model: StepRegression, name: str, steps: MeasuredSteps) -> Iterator[HeldOut]:
    """Over all steps, and regime by regime."""
    regimes = regimes_of(steps.features)
    for regime in ("all", *REGIMES):
        some = steps if regime == "all" else steps.where(regimes == regime)
        errors = Errors.of(model.durations_ns(some.features) / 1e3, some.device_us)
        physical = Errors.of(model.physical_us(some.features), some.device_us)
        if errors is not None and physical is not None:
            yield HeldOut(name, regime, errors, physical, int(model.outside(some.features).sum()))


def _fit(sources: Sequence[StepsSource]) -> tuple[StepRegression, tuple[float, float] | None]:
    graph_sizes = tuple(sources[0].about.get("cudagraph_capture_sizes") or ())
    points = [s.steps for s in sources if s.kind == "points" and len(s.steps)]
    runs = [s.steps for s in sources if s.kind == "run" and len(s.steps) >= LEAST_STEPS]
    if not points or not runs:
        everything = [s.steps for s in sources if len(s.steps)]
        return StepRegression.fit(everything, graph_sizes), None
    level = _level(StepRegression.fit(points, graph_sizes), runs)
    return StepRegression.fit([*(_raised(p, level) for p in points), *runs], graph_sizes), level


def _level(of_points: StepRegression, runs: Sequence[MeasuredSteps]) -> tuple[float, float]:
    """(factor, us) that bring the times of points to those of runs."""
    foretold = np.concatenate([of_points.durations_ns(run.features) / 1e3 for run in runs])
    measured = np.concatenate([run.device_us for run in runs])
    inside = ~np.concatenate([of_points.outside(run.features) for run in runs])
    if not inside.any():
        return 1.0, 0.0
    terms = np.stack([foretold, np.ones(len(foretold))], axis=1)[inside]
    factor, constant = PhysicalModel.fit_robust(terms, measured[inside]).weights.tolist()
    return (factor, constant) if factor > 0 else (1.0, 0.0)


def _raised(points: MeasuredSteps, level: tuple[float, float]) -> MeasuredSteps:
    factor, constant = level
    return MeasuredSteps(points.features, factor * points.device_us + constant, points.prepare_us)


def coverage(features: StepFeatures) -> dict[str, list[int]]:
    """From and to what value each quantity of a step was measured."""
    names = ("new_tokens", "rows", "decode_rows", "decode_context_tokens", "prefill_tokens", "prefill_pairs")
    return {name: [int(getattr(features, name).min()), int(getattr(features, name).max())] for name in names}
