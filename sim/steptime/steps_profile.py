"""A profile of whole steps: the fit to measured ones, what it was measured on, and its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.steptime.calibration import Calibration
from servetwin.sim.steptime.host_times import HostTimes
from servetwin.sim.steptime.measured_steps import joined
from servetwin.sim.steptime.step_fit import StepFit, coverage
from servetwin.sim.steptime.step_regression import StepRegression
from servetwin.sim.steptime.step_sources import StepsSource


class StepsProfile(BaseModel):
    """Times of whole steps of one model on one machine, and of its host between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    kind: Literal["steps"] = "steps"
    about: dict[str, Any]
    """What the executor said of itself: model, hardware, versions."""
    engine: dict[str, Any]
    """Limits of the measured engine, which a run takes where nothing else is asked for."""
    written: str | None = None
    """The day of the fit."""
    sources: list[dict[str, Any]]
    """What was fitted to: kind, path, steps."""
    coverage: dict[str, list[int]]
    """From and to what value the quantities of a step were measured."""
    regression: StepRegression
    host: HostTimes | None
    """None: no run on the wall clock was among the sources."""
    errors: list[dict[str, Any]]
    """Of runs that were left out of the fit, per regime (`step_fit.HeldOut`)."""
    untested: list[str]
    """Regimes for which there are none: the profile is calibrated when this is empty."""
    factor: Calibration | None = None
    """Of all times on the device, fitted to one part of a run: a machine's speed wanders."""

    @classmethod
    def of(cls, sources: Sequence[StepsSource], fit: StepFit, written: str | None = None) -> Self:
        return cls(
            about=sources[0].about,
            engine=sources[0].engine,
            written=written,
            sources=[{"kind": s.kind, "path": s.path, "steps": len(s.steps)} for s in sources],
            coverage=coverage(joined([s.steps for s in sources]).features),
            regression=fit.regression,
            host=fit.host,
            errors=[h.to_json() for h in fit.held_out],
            untested=list(fit.untested),
        )

    @property
    def calibrated(self) -> bool:
        """Its error is known for every regime."""
        return not self.untested

    def step_model(self) -> StepRegression:
        """With the factor, and with what was seen of the worker."""
        model = self.regression if self.factor is None else self.regression.scaled(self.factor.value)
        if self.host is None:
            return model
        return replace(
            model,
            turnaround_ns=self.host.turnaround_ns,
            overlaps_preparation=self.host.overlaps_preparation,
        )

    def host_model(self) -> LinearHostModel | None:
        """Time between steps; None: it was not measured."""
        return None if self.host is None else self.host.model()

    def describe_error(self) -> str:
        """In one line, for every output of a run with these times."""
        said = self._tests_in_words()
        if self.factor is not None:
            said += f"; device times x {self.factor.value:.4g}, fitted to the {self.factor.on}"
        return said

    def _tests_in_words(self) -> str:
        runs = [e for e in self.errors if e["of"] == "all"]
        if not runs:
            return "not calibrated: no run was left out of the fit to test it"
        worst = max(runs, key=lambda e: e["mape_percent"])
        bias = max((e["bias_percent"] for e in runs), key=abs)
        said = (
            f"steps of runs left out of the fit were {worst['mape_percent']:.1f} % off in the mean (median "
            f"{worst['median_percent']:.1f} %) in the worst of {len(runs)}, with a bias of up to {bias:+.1f} %"
        )
        return f"{said}; not calibrated for {' and '.join(self.untested)} steps" if self.untested else said
