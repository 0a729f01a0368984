"""Durations of whole steps, fitted to measured ones: a physical model, and a bounded correction near the measurements.

The correction is the smoothed ratio of measured to physical time at the nearest measured shapes. Outside the measured
region, where nothing supports it, the physical model stands alone and the step is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.steptime.features import Bools, Ints, StepFeatures
from servetwin.sim.steptime.graph_sizes import padded_tokens
from servetwin.sim.steptime.physical import PhysicalModel
from servetwin.sim.steptime.step_terms import coordinates, device_terms, host_terms

Floats = NDArray[np.float64]
BOUND = float(np.log(1.6))
"""Of the correction, either way: what a physical model is off at most where it is worth anything."""
NEIGHBOURS = 32
MOST_CENTRES = 600
"""Measured shapes that the correction rests on; more steps than that are merged into their neighbourhoods."""
SMOOTHING = 1.0


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps: shapes and times in us, all of shape [n]."""

    features: StepFeatures
    device_us: Floats
    prepare_us: Floats
    graph_sizes: tuple[int, ...] = ()
    """Sizes of captured decode batches."""

    def __len__(self) -> int:
        return len(self.device_us)

    def where(self, chosen: Bools) -> MeasuredSteps:
        """Some of them."""
        return MeasuredSteps(
            self.features.where(chosen), self.device_us[chosen], self.prepare_us[chosen], self.graph_sizes
        )


@dataclass(frozen=True)
class StepRegression:
    """A StepModel. Everything it holds is plain numbers, so that a profile can keep it."""

    device_weights: tuple[float, ...]
    prepare_weights: tuple[float, ...]
    centres: tuple[tuple[float, ...], ...]
    """Coordinates of measured shapes [m, 6] ..."""
    log_ratios: tuple[float, ...]
    """... and what the physical model falls short of there [m]."""
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    """The measured region, coordinate by coordinate."""
    graph_sizes: tuple[int, ...] = ()

    @classmethod
    def fit(cls, steps: MeasuredSteps) -> StepRegression:
        """Raises ValueError without steps."""
        if not len(steps):
            raise ValueError("no measured steps to fit to")
        tokens = padded_tokens(steps.features, steps.graph_sizes)
        terms = device_terms(steps.features, tokens)
        device = PhysicalModel.fit(terms, steps.device_us)
        prepare = PhysicalModel.fit(host_terms(steps.features), np.maximum(steps.prepare_us, 1e-3))
        places = coordinates(steps.features)
        ratios = np.clip(np.log(steps.device_us / np.maximum(device(terms), 1e-9)), -BOUND, BOUND)
        centres, log_ratios = _merged(places, ratios)
        return cls(
            tuple(device.weights.tolist()),
            tuple(prepare.weights.tolist()),
            tuple(map(tuple, centres.tolist())),
            tuple(log_ratios.tolist()),
            tuple(places.min(axis=0).tolist()),
            tuple(places.max(axis=0).tolist()),
            steps.graph_sizes,
        )

    def durations_ns(self, features: StepFeatures) -> Ints:
        us = self.physical_us(features) * np.exp(self._correction(features))
        return np.where(features.new_tokens > 0, np.maximum(np.rint(us * 1e3), 1), 0).astype(np.int64)

    def physical_us(self, features: StepFeatures) -> Floats:
        """Without the correction, [n]."""
        tokens = padded_tokens(features, self.graph_sizes)
        return device_terms(features, tokens) @ np.array(self.device_weights)

    def prepare_ns(self, features: StepFeatures) -> Ints:
        """Host time to update states and pack the batch, integer ns [n]."""
        us = host_terms(features) @ np.array(self.prepare_weights)
        return np.where(features.new_tokens > 0, np.rint(us * 1e3), 0).astype(np.int64)

    def outside(self, features: StepFeatures) -> Bools:
        """Which steps [n] lie beyond what was measured in some coordinate. Below the least, launching rules."""
        beyond: Bools = (coordinates(features) > np.array(self.highest) + 1e-9).any(axis=1)
        return beyond

    def _correction(self, features: StepFeatures) -> Floats:
        if self._smooth is None:
            return np.zeros(len(features))
        found = np.clip(self._smooth(coordinates(features)), -BOUND, BOUND)
        return np.where(self.outside(features), 0.0, found)

    @cached_property
    def _smooth(self) -> Any:
        from scipy.interpolate import RBFInterpolator

        centres = np.array(self.centres)
        if len(centres) < 2 * centres.shape[1]:
            return None
        neighbours = min(NEIGHBOURS, len(centres))
        return RBFInterpolator(
            centres,
            np.array(self.log_ratios),
            neighbors=neighbours,
            smoothing=SMOOTHING,
            kernel="linear",
            degree=0,
        )


def _merged(places: Floats, ratios: Floats) -> tuple[Floats, Floats]:
    """At most MOST_CENTRES places, each with the median ratio of the steps around it."""
    distinct, which = np.unique(np.round(places, 2), axis=0, return_inverse=True)
    which = which.ravel()
    if len(distinct) > MOST_CENTRES:
        from scipy.cluster.vq import kmeans2

        distinct, which = kmeans2(places, MOST_CENTRES, minit="++", seed=0)
    medians = np.array(
        [np.median(ratios[which == i]) if (which == i).any() else np.nan for i in range(len(distinct))]
    )
    kept = ~np.isnan(medians)
    return distinct[kept], medians[kept]


def regimes_of(features: StepFeatures) -> Sequence[str]:
    """ "prefill", "decode" or "mixed" for each step."""
    prefill, decode = features.prefill_rows > 0, features.decode_rows > 0
    return np.select([prefill & decode, prefill], ["mixed", "prefill"], "decode").tolist()
