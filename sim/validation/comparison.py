"""Measured against simulated: latencies, their errors, and the curves of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from servetwin.sim.metrics import Distribution
from servetwin.sim.units import NS_PER_S
from servetwin.sim.validation.measured import MeasuredRun, metrics_of
from servetwin.sim.validation.replay import SimulatedRun

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
CURVES = ("running", "waiting", "kv_percent")
SHIFTS_S = np.arange(-10, 11) / 10
"""Constant shifts between two clocks that are tried for the curves: samples are a second apart."""


@dataclass(frozen=True, slots=True)
class Stats:
    """In seconds; percentiles are numpy's linear ones."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Floats) -> Stats | None:
        """None where no request has such a time."""
        known = seconds[~np.isnan(seconds)]
        if not len(known):
            return None
        return cls(float(known.mean()), *(float(x) for x in np.percentile(known, (50, 90, 99))))

    @classmethod
    def pooled(cls, ns: Distribution) -> Stats | None:
        """Of samples in ns."""
        if ns.mean is None:
            return None
        percentiles = (ns.percentile(p) or 0.0 for p in (50, 90, 99))
        return cls(ns.mean / NS_PER_S, *(p / NS_PER_S for p in percentiles))

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of the same requests."""

    measured: Stats | None
    simulated: Stats | None
    median_request_error_percent: float | None
    """Median over requests of the absolute error of each."""

    def error_percent(self, name: str = "mean_s") -> float | None:
        """Of one of the Stats; None where it is not known, or 0."""
        if self.measured is None or self.simulated is None or getattr(self.measured, name) == 0:
            return None
        ratio: float = getattr(self.simulated, name) / getattr(self.measured, name)
        return 100 * (ratio - 1)

    @property
    def errors_percent(self) -> dict[str, float | None]:
        """By mean, p50, p90, p99."""
        return {name.removesuffix("_s"): self.error_percent(name) for name in Stats.__slots__}

    def to_json(self) -> dict[str, Any]:
        return {
            "measured": None if self.measured is None else self.measured.to_json(),
            "simulated": None if self.simulated is None else self.simulated.to_json(),
            "error_percent": self.errors_percent,
            "median_request_error_percent": self.median_request_error_percent,
        }


def compare_metrics(
    measured: pd.DataFrame, simulated: pd.DataFrame, part: slice = slice(None)
) -> dict[str, MetricComparison]:
    """By name of `measured.FORMULAS` (without the pooled ITL), for the requests of `part` in order of arrival."""
    theirs, ours = metrics_of(measured), metrics_of(simulated)
    return {name: _compare(theirs[name][part], ours[name][part]) for name in theirs}


def _compare(measured: Floats, simulated: Floats) -> MetricComparison:
    # A time that one side does not know is left out on both.
    simulated = np.where(np.isnan(measured), np.nan, simulated)
    both = ~np.isnan(measured) & ~np.isnan(simulated) & (measured > 0)
    errors = 100 * np.abs(simulated[both] / measured[both] - 1)
    return MetricComparison(
        Stats.of(measured), Stats.of(simulated), float(np.median(errors)) if both.any() else None
    )


def compare_gaps(
    measured: Distribution | None, simulated: Distribution | None
) -> dict[str, MetricComparison]:
    """ITL by its name, pooled over all requests; nothing where one side does not know it."""
    if measured is None or simulated is None:
        return {}
    return {"itl": MetricComparison(Stats.pooled(measured), Stats.pooled(simulated), None)}


@dataclass(frozen=True, slots=True)
class CurveComparison:
    """Of samples of a measured curve and the simulated one at those times."""

    mean_absolute_error: float
    mean_measured: float
    max_measured: float
    max_simulated: float


def compare_curves(run: MeasuredRun, simulated: SimulatedRun) -> tuple[float, dict[str, CurveComparison]]:
    """(the constant shift of the measured clock in s that fits best, curve -> comparison); nothing without samples."""
    if run.curves is None:
        return 0.0, {}
    shifts = SHIFTS_S if run.curves_have_own_clock else [0.0]
    found = [(float(shift), _curves_at(run.curves, simulated.curves, shift)) for shift in shifts]
    return min(found, key=lambda f: _misfit(f[1]))


def _curves_at(measured: pd.DataFrame, simulated: pd.DataFrame, shift_s: float) -> dict[str, CurveComparison]:
    times = simulated["time_s"].to_numpy()
    at = measured["time_s"].to_numpy() + shift_s
    inside = (at >= 0) & (at <= times[-1])
    last = np.searchsorted(times, at[inside], side="right") - 1
    found = {}
    for name in CURVES:
        theirs, ours = (
            measured[name].to_numpy(dtype=np.float64)[inside],
            simulated[name].to_numpy(dtype=np.float64),
        )
        known = ~np.isnan(theirs)
        if known.any():
            found[name] = CurveComparison(
                float(np.abs(ours[last][known] - theirs[known]).mean()),
                float(theirs[known].mean()),
                float(theirs[known].max()),
                float(ours.max()),
            )
    return found


def _misfit(curves: dict[str, CurveComparison]) -> float:
    """Relative to what was measured, so that no curve outweighs the others."""
    if not curves:
        return float("inf")
    return sum(c.mean_absolute_error / max(c.max_measured, 1) for c in curves.values())


@dataclass(frozen=True, slots=True)
class Band:
    """Requests that shared the engine with about as many others."""

    rows: str
    requests: int
    tpot_error_percent: float
    """Median signed error."""


BANDS = (1, 3, 33, 65, 120)
"""First number of rows of each band: edges of kernels and graphs lie at 32 and 64."""


def residual_bands(measured: pd.DataFrame, simulated: SimulatedRun) -> list[Band]:
    """Where the error of the time per token comes from: by the mean number of running rows beside each request."""
    theirs, ours = metrics_of(measured)["tpot"], metrics_of(simulated.requests)["tpot"]
    beside = _mean_running(simulated)
    bands = []
    for first, beyond in zip(BANDS, (*BANDS[1:], None), strict=True):
        inside = (
            (beside >= first)
            & (beside < (np.inf if beyond is None else beyond))
            & ~np.isnan(theirs)
            & (theirs > 0)
        )
        if inside.any():
            name = f"{first} and more" if beyond is None else f"{first}-{beyond - 1}"
            error = float(np.median(100 * (ours[inside] / theirs[inside] - 1)))
            bands.append(Band(name, int(inside.sum()), error))
    return bands


def _mean_running(simulated: SimulatedRun) -> Floats:
    """Rows that ran on average while each request was decoded, shape [n]."""
    steps, requests = simulated.steps, simulated.requests
    start = steps["start_s"].to_numpy()
    total = np.concatenate([[0], np.cumsum(steps["running"].to_numpy(dtype=np.float64))])
    first = np.searchsorted(start, requests["first_token_s"].to_numpy(dtype=np.float64))
    last = np.maximum(np.searchsorted(start, requests["last_token_s"].to_numpy(dtype=np.float64)), first + 1)
    last = np.minimum(last, len(start))
    mean: Floats = (total[last] - total[first]) / np.maximum(last - first, 1)
    return mean


@dataclass(frozen=True, slots=True)
class Load:
    """How close the simulated engine was to saturation, where small errors of step times become large ones of waits."""

    waiting_percent: float
    """Of its busy time, with requests waiting at the same time."""
    unfinished_percent: float
    """Of the requests, when the last one arrived."""

    @property
    def words(self) -> str:
        if self.waiting_percent < 10:
            return "below saturation"
        return "saturated" if self.waiting_percent > 50 else "near saturation"


def load_of(simulated: SimulatedRun) -> Load:
    steps, requests = simulated.steps, simulated.requests
    busy = (steps["prepare_s"] + steps["device_s"]).to_numpy(dtype=np.float64)
    waiting = busy[steps["waiting"].to_numpy() > 0].sum()
    open_at_end = requests["last_token_s"] > requests["arrival_s"].max()
    return Load(100 * float(waiting / busy.sum()), 100 * float(open_at_end.mean()))


def makespan_s(requests: pd.DataFrame) -> float:
    """From the first arrival to the last token."""
    return float(requests["last_token_s"].max() - requests["arrival_s"].min())


def throughput_tokens_per_s(requests: pd.DataFrame) -> float:
    """Output tokens over the makespan."""
    return float(requests["output_tokens"].sum()) / makespan_s(requests)
