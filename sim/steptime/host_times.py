"""The host's time between steps, from a run on the wall clock: scheduling, handing over, taking the tokens in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from servetwin.sim.host_model import LinearHostModel
from servetwin.sim.steptime.physical import PhysicalModel

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
NS_PER_S = 1e9
LEAST_NS = 1.0


class HostTimes(BaseModel):
    """Whole ns. A step costs its constant, and so much more for every row and every new request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule_base_ns: NonNegativeInt
    schedule_per_row_ns: NonNegativeInt
    schedule_per_new_ns: NonNegativeInt
    update_base_ns: NonNegativeInt
    update_per_row_ns: NonNegativeInt
    turnaround_ns: NonNegativeInt
    """From the end of a step on the device to the worker's beginning of the next one that it already has."""
    overlaps_preparation: bool
    """The worker was seen preparing a step while the device ran the one before."""

    @classmethod
    def of(cls, steps: list[pd.DataFrame]) -> HostTimes | None:
        """From tables steps/ of runs on the wall clock; those without host times (of simulations) do not count.

        None where nothing is left.
        """
        import pandas as pd

        live = [busy for s in steps if (busy := _busy(s))["host_s"].gt(0).any()]
        if not live:
            return None
        busy = pd.concat(live)
        rows, new = (busy[name].to_numpy(dtype=np.float64) for name in ("rows", "new_requests"))
        ones = np.ones(len(busy))
        schedule = _fitted([ones, rows, new], busy["schedule_s"])
        update = _fitted([ones, rows], busy["host_s"] - busy["schedule_s"])
        return cls(
            schedule_base_ns=schedule[0] + _loop_gap_ns(live),
            schedule_per_row_ns=schedule[1],
            schedule_per_new_ns=schedule[2],
            update_base_ns=update[0],
            update_per_row_ns=update[1],
            turnaround_ns=turnaround_ns(live),
            overlaps_preparation=any(overlaps_preparation(s) for s in live),
        )

    def model(self) -> LinearHostModel:
        """For the simulation; the turnaround is the worker's."""
        return LinearHostModel(**self.model_dump(exclude={"turnaround_ns", "overlaps_preparation"}))


def overlaps_preparation(steps: pd.DataFrame) -> bool:
    """Whether any step of the run was prepared before the one in front of it had left the device."""
    busy = steps[steps["rows"] > 0]
    device_end = (busy["device_start_s"] + busy["device_s"]).to_numpy()[:-1]
    # Seconds in a file are rounded nanoseconds.
    return bool((busy["prepare_start_s"].to_numpy()[1:] < device_end - 1e-9).any())


def turnaround_ns(runs: list[pd.DataFrame]) -> int:
    """The median over steps that had been handed over before the one in front of them was through."""
    gaps = []
    for steps in (s[s["rows"] > 0] for s in runs):
        device_end = (steps["device_start_s"] + steps["device_s"]).to_numpy()[:-1]
        handed_over = (steps["start_s"] + steps["schedule_s"]).to_numpy()[1:]
        begun = steps["prepare_start_s"].to_numpy()[1:]
        gaps.append((begun - device_end)[handed_over <= device_end])
    waiting = np.concatenate(gaps)
    return max(round(float(np.median(waiting)) * NS_PER_S), 0) if len(waiting) else 0


def _busy(steps: pd.DataFrame) -> pd.DataFrame:
    """Steps with tokens; those of versions that did not count new requests say nothing of the host."""
    return steps[(steps["rows"] > 0) & steps["new_requests"].notna()]


def _loop_gap_ns(runs: list[pd.DataFrame]) -> int:
    """From the tokens of a step being out to the next schedule call, while there is work: the loop around both."""
    gaps = []
    for steps in runs:
        start, end = steps["start_s"].to_numpy(), steps["end_s"].to_numpy()
        ahead = 2 if (start[1:] < end[:-1]).any() else 1
        gaps.append(start[ahead:] - end[:-ahead])
    between = np.concatenate(gaps)
    return max(round(float(np.median(between)) * NS_PER_S), 0) if len(between) else 0


def _fitted(columns: list[Floats], times_s: pd.Series[float]) -> list[int]:
    times_ns = np.maximum(times_s.to_numpy(dtype=np.float64) * NS_PER_S, LEAST_NS)
    weights = PhysicalModel.fit_robust(np.stack(columns, axis=1), times_ns).weights
    return [round(weight) for weight in weights.tolist()]
