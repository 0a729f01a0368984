"""A fit of whole steps to all sources, and how well it foretells each run that was left out of it.

Points of a profile, measured one by one, say how the time goes with the shape over a wide region; runs on the wall
clock say what steps take where requests are served. Every source counts alike.

The correction is trusted as far as it helps for runs that it has not seen: where a machine's speed wanders, its
measurements hold shapes that are none. How far (one of TRUST) is chosen by the errors that are then reported, so these
are that little too good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.errors import Errors
from servetwin.sim.steptime.features import REGIMES, StepFeatures, regimes_of
from servetwin.sim.steptime.host_times import HostTimes
from servetwin.sim.steptime.measured_steps import MeasuredSteps, joined
from servetwin.sim.steptime.step_regression import StepRegression
from servetwin.sim.steptime.step_sources import StepsSource

Floats = NDArray[np.float64]
TRUST = (0.0, 0.5, 1.0)
LEAST_TESTED = 10
"""Steps of a regime in runs that were left out, for an error to be worth its name."""


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
    held_out: tuple[HeldOut, ...]
    spread_percent: float
    """Median distance of a step from the fit to all of them."""

    @property
    def untested(self) -> tuple[str, ...]:
        """Regimes of which runs that were left out have too few steps: for these nothing is known of the error."""
        tested = {name: sum(h.errors.n for h in self.held_out if h.regime == name) for name in REGIMES}
        return tuple(name for name, steps in tested.items() if steps < LEAST_TESTED)


def fit_sources(sources: Sequence[StepsSource]) -> StepFit:
    """Raises ValueError (FitExtraMissingError without scikit-learn)."""
    tests = list(_tests(sources))
    trust = _trust(tests)
    held_out = [
        h for run, model in tests for h in errors_of(replace(model, trust=trust), run.path, run.steps)
    ]
    regression = _fit(sources)
    regression = replace(regression, trust=trust)
    tables = [s.table for s in sources if s.table is not None]
    return StepFit(regression, HostTimes.of(tables), tuple(held_out), _spread_percent(regression, sources))


def _tests(sources: Sequence[StepsSource]) -> Iterator[tuple[StepsSource, StepRegression]]:
    """Each run in turn, where something else is left, and the fit to that."""
    for run in (s for s in sources if s.kind == "run" and len(s.steps)):
        others = [s for s in sources if s is not run]
        if any(len(s.steps) for s in others):
            yield run, _fit(others)


def _trust(tests: Sequence[tuple[StepsSource, StepRegression]]) -> float:
    """The one of TRUST with the least mean error over the runs that were left out; all of it where none was."""

    def error(trust: float) -> float:
        models = [(run.steps, replace(model, trust=trust)) for run, model in tests]
        return float(np.mean([_mape(model, steps) for steps, model in models]))

    return min(TRUST, key=error) if tests else TRUST[-1]


def _spread_percent(model: StepRegression, sources: Sequence[StepsSource]) -> float:
    steps = joined([s.steps for s in sources])
    return 100 * float(np.median(np.abs(model.durations_ns(steps.features) / (1e3 * steps.device_us) - 1)))


def _mape(model: StepRegression, steps: MeasuredSteps) -> float:
    return float(np.abs(model.durations_ns(steps.features) / (1e3 * steps.device_us) - 1).mean())


def errors_of(model: StepRegression, name: str, steps: MeasuredSteps) -> Iterator[HeldOut]:
    """Over all steps, and regime by regime."""
    regimes = regimes_of(steps.features)
    for regime in ("all", *REGIMES):
        some = steps if regime == "all" else steps.where(regimes == regime)
        errors = Errors.of(model.durations_ns(some.features) / 1e3, some.device_us)
        physical = Errors.of(model.physical_us(some.features), some.device_us)
        if errors is not None and physical is not None:
            yield HeldOut(name, regime, errors, physical, int(model.outside(some.features).sum()))


def _fit(sources: Sequence[StepsSource]) -> StepRegression:
    graph_sizes = tuple(sources[0].about.get("cudagraph_capture_sizes") or ())
    return StepRegression.fit([s.steps for s in sources if len(s.steps)], graph_sizes)


def coverage(features: StepFeatures) -> dict[str, list[int]]:
    """From and to what value each quantity of a step was measured."""
    names = ("new_tokens", "rows", "decode_rows", "decode_context_tokens", "prefill_tokens", "prefill_pairs")
    return {name: [int(getattr(features, name).min()), int(getattr(features, name).max())] for name in names}
