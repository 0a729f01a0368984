"""Durations of whole steps, fitted to measured ones: a physical model, and a bounded correction near the measurements.

The physical model is a non-negative sum of what a step does. The correction is the smoothed ratio of measured to
physical time. Outside the measured region, where nothing supports it, the physical model stands alone and the step is
marked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.features import Bools, Ints, StepFeatures, regimes_of
from servetwin.sim.steptime.graph_sizes import graph_tokens
from servetwin.sim.steptime.measured_steps import MeasuredSteps, joined
from servetwin.sim.steptime.physical import PhysicalModel
from servetwin.sim.steptime.smooth_ratio import SmoothRatio, merged
from servetwin.sim.steptime.step_terms import (
    NUM_DEVICE_TERMS,
    NUM_EXTENTS,
    NUM_PREPARE_TERMS,
    coordinates,
    device_terms,
    extent,
    prepare_terms,
)

Floats = NDArray[np.float64]
BOUND = float(np.log(1.6))
"""Of the correction, either way: what a physical model is off at most where it is worth anything."""
MOST_CENTRES = 100
"""Places per source that the correction rests on; more steps than that are merged with their neighbours."""
LEAST_CENTRES = 12
LEAST_US = 1e-3


@dataclass(frozen=True)
class StepRegression:
    """A StepModel. Everything it holds is plain numbers, so that a profile can keep it."""

    device_weights: tuple[float, ...]
    """us per unit of each of `device_terms`."""
    prepare_weights: tuple[float, ...]
    """us per unit of each of `prepare_terms`."""
    correction: SmoothRatio | None
    """None: too few places were measured."""
    trust: float
    """How much of the correction is applied, 0 to 1."""
    highest: tuple[float, ...]
    """The measured region: the most of each quantity of `extent`."""
    graph_sizes: tuple[int, ...] = ()
    """Sizes of captured decode batches."""
    turnaround_ns: int = 0
    """What the worker takes between two steps beyond preparing."""
    overlaps_preparation: bool = True
    """The worker prepares a step while the device runs the one before."""

    def __post_init__(self) -> None:
        for name, terms in (("device_weights", NUM_DEVICE_TERMS), ("prepare_weights", NUM_PREPARE_TERMS)):
            weights = getattr(self, name)
            if len(weights) != terms or not all(0 <= weight < np.inf for weight in weights):
                raise ValueError(f"{name} must be {terms} numbers, 0 or more")
        if len(self.highest) != NUM_EXTENTS:
            raise ValueError(f"highest must be {NUM_EXTENTS} numbers, got {len(self.highest)}")

    @classmethod
    def fit(
        cls, sources: list[MeasuredSteps], graph_sizes: tuple[int, ...] = (), *, corrected: bool = True
    ) -> StepRegression:
        """All sources count alike, however many steps they have, and rare kinds of steps for more than their number.

        `corrected`: with the correction. Raises ValueError without steps, FitExtraMissingError without scikit-learn.
        """
        if not any(map(len, sources)):
            raise ValueError("no measured steps to fit to")
        steps = joined(sources)
        importance = np.concatenate([_importance(source) for source in sources])
        terms = _terms(steps.features, graph_sizes)
        device = PhysicalModel.fit_robust(terms, steps.device_us, importance)
        prepare = PhysicalModel.fit_robust(
            prepare_terms(steps.features), np.maximum(steps.prepare_us, LEAST_US), importance
        )
        ratios = np.log(steps.device_us / np.maximum(device(terms), LEAST_US))
        return cls(
            tuple(device.weights.tolist()),
            tuple(prepare.weights.tolist()),
            _correction(sources, np.clip(ratios, -BOUND, BOUND)) if corrected else None,
            1.0,
            tuple(extent(steps.features).max(axis=0).tolist()),
            tuple(graph_sizes),
        )

    def durations_ns(self, features: StepFeatures) -> Ints:
        us = self.physical_us(features) * np.exp(self._log_ratio(features))
        return np.where(features.new_tokens > 0, np.maximum(np.rint(us * 1e3), 1), 0).astype(np.int64)

    def physical_us(self, features: StepFeatures) -> Floats:
        """Without the correction, [n]."""
        found: Floats = _terms(features, self.graph_sizes) @ np.array(self.device_weights)
        return found

    def graph_tokens(self, features: StepFeatures) -> Ints:
        """The size that each step is padded to, [n]; 0 where it runs without a graph."""
        return _decode_graphs(features, self.graph_sizes)

    def scaled(self, factor: float) -> StepRegression:
        """The same with all times on the device longer by this factor."""
        return replace(self, device_weights=tuple(factor * weight for weight in self.device_weights))

    def prepare_ns(self, features: StepFeatures) -> Ints:
        """Host time to update states and pack the batch, integer ns [n]."""
        us = prepare_terms(features) @ np.array(self.prepare_weights)
        return np.where(features.new_tokens > 0, np.rint(us * 1e3), 0).astype(np.int64)

    def outside(self, features: StepFeatures) -> Bools:
        """Which steps [n] have more of something than any measured one. Below the least, launching rules."""
        return np.asarray((extent(features) > np.array(self.highest)).any(axis=1), dtype=np.bool_)

    def _log_ratio(self, features: StepFeatures) -> Floats:
        if self.correction is None or self.trust == 0:
            return np.zeros(len(features))
        found = np.clip(self.correction(coordinates(features)), -BOUND, BOUND)
        return np.where(self.outside(features), 0.0, self.trust * found)


def _importance(source: MeasuredSteps) -> Floats:
    """[n], 1 in sum. A run is decode steps by nineteen parts in twenty, but prompts decide the time to first token."""
    _, which, counts = np.unique(regimes_of(source.features), return_inverse=True, return_counts=True)
    each: Floats = 1 / np.sqrt(counts[which.ravel()])
    total = float(each.sum())
    return each / total if total else each


def _decode_graphs(features: StepFeatures, graph_sizes: tuple[int, ...]) -> Ints:
    """The executor captures decode batches alone."""
    return np.where(features.prefill_rows == 0, graph_tokens(features, graph_sizes), 0)


def _terms(features: StepFeatures, graph_sizes: tuple[int, ...]) -> Floats:
    padded = _decode_graphs(features, graph_sizes)
    eager = (padded == 0) & bool(graph_sizes)
    return device_terms(features, np.maximum(features.new_tokens, padded), eager)


def _correction(sources: list[MeasuredSteps], log_ratios: Floats) -> SmoothRatio | None:
    """Of every source as many places as it has, up to MOST_CENTRES; None: fewer than LEAST_CENTRES in all."""
    parts, begin = [], 0
    for source in sources:
        if len(source):
            ratios = log_ratios[begin : begin + len(source)]
            parts.append(merged(coordinates(source.features), ratios, MOST_CENTRES))
        begin += len(source)
    places, ratios = (np.concatenate(column) for column in zip(*parts, strict=True))
    return SmoothRatio.fit(places, ratios) if len(places) >= LEAST_CENTRES else None
